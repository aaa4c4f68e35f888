"""The strategies that could be run: the values of every dimension, and the rules that reject some of them."""

__all__ = [
    "choices",
    "problem",
]
