"""Inputs of the search: models and clusters, and the files that describe them."""
