"""Checkpoints: written for one layout over ranks, read for any."""
