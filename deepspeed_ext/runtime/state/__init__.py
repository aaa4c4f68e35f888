"""State of a micro-batch between the token slices of a stage: keys and values, carried states, counts."""

__all__ = ["sequence_state"]
