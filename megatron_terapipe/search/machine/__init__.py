"""Clusters, devices, trainers, and the launch of programs on hosts."""

__all__ = ["cluster", "cluster_files"]
