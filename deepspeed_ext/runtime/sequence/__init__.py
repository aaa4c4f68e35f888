"""State of layers between the token slices of a sequence: keys and values, documents, dropout by place."""

__all__ = [
    "sequence_state",
]
