"""Numbers and events of a run, as they are reported and kept: metrics, throughput, progress."""
