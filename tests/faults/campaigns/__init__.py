"""Campaigns of faults: one file for each class of them."""
