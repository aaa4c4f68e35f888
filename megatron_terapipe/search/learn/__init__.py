"""Measured runs: read from files, fitted by the constants of the cost model, and held beside predictions."""
