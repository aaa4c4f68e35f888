"""Training of the model: learning rate, DeepSpeed settings, and the loop around the engine."""

__all__ = ["pretrain"]
