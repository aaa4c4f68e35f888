"""Weights in the files of Hugging Face: which tensors each of ours is there, and back."""
