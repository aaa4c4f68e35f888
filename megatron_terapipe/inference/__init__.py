"""Runs a trained model on one process."""
