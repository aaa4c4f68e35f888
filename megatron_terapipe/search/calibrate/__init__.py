"""What measured runs say about the constants of the cost model."""
