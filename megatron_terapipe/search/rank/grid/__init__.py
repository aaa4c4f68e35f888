"""Prices of a grid of strategies in closed form: estimates and bounds of time, the least memory, balanced stages."""
