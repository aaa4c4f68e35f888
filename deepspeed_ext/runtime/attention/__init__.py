"""Attention of one token slice over the keys and values up to its end, forward and backward, by device."""

__all__ = ["recurrences"]
