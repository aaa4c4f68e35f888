"""Measurements of speed and memory: ratios within one run, medians over interleaved rounds."""
