"""Clusters, devices and trainers, and the files that describe them."""

__all__ = ["cluster", "cluster_files"]
