"""Faults made on purpose, and their effects on runs."""
