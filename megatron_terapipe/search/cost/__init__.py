"""Cost of a strategy: seconds of an iteration, and bytes on each pipeline rank."""

__all__ = [
    "prediction",
    "pricing",
]
