"""Bytes on each pipeline rank: weights and states, activations, and the peak of both."""
