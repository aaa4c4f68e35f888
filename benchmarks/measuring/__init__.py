"""Shared parts of benchmarks: models, groups of processes, counters, and reports."""
