"""The layers of a GPT in plain torch."""

__all__ = ["tensor_parallel"]
