"""The parallel layout: how the work is laid out over ranks, stages and token slices."""
