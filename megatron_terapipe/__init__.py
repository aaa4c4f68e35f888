"""A Megatron-style GPT trainer with token slices: the model, its data, its training, and the search for a strategy."""

__all__ = ["model", "search", "strategy", "training"]
