"""Seconds of the ops of one layer: by a roofline, by measured kernels, or by a measured profile."""
