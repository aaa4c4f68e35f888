"""The place of this process among all that were launched, as its launcher's variables tell it."""

__all__ = [
    "environment",
]
