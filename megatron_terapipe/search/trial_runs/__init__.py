"""Runs strategies for real, a few iterations each, and keeps what came of them."""
