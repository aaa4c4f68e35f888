"""Measured runs: read, made and written; what they say of the constants of the cost model; predictions beside them."""
