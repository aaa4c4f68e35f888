"""Instruments that measure an iteration while it runs: timers, a profiler, the count of zeros in the gradient."""
