"""Faults made on purpose, and what became of the runs that they met."""
