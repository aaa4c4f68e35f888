"""Solvers inside the search: layers of the stages, token slices, and the order of nodes."""
