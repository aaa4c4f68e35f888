"""Measured runs: read from files, constants of the cost model fitted to them, and predictions compared with them."""
