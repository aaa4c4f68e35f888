"""Gradients of weights: computed apart, added up, and summed over replicas, tensor-parallel ranks and tied stages."""

__all__ = ["weight_gradients"]
