"""What several benchmarks measure with: models, groups of processes, counters, and reports."""
