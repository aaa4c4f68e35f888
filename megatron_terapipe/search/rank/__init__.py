"""The best strategies of a space: bounds, simulations, and solvers for what the space only samples."""

__all__ = ["ranked", "search", "space"]
