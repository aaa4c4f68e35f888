"""The progress of a rank through its program, and the reason why it stands still."""

__all__ = [
    "observers",
]
