"""Sees that the launcher or another rank is gone, says which, and ends this rank: nobody trains on alone."""

__all__ = [
    "watch",
]
