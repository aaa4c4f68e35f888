"""Inputs of the search: models and clusters, and the files that describe them."""

__all__ = [
    "cluster",
    "cluster_files",
    "workload",
    "workload_files",
]
