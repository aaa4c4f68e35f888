"""Micro-batches: cut into token slices, handed to the layers, and what lives of one between forward and backward."""

__all__ = [
    "batch",
]
