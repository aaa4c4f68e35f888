"""The best strategies of a space: bounds, simulations, and solvers for the dimensions that the space only samples."""

__all__ = ["search", "space"]
