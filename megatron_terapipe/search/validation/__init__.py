"""Predictions held against measured trials: how far off, in the right order or not, and as sure as they say or not."""
