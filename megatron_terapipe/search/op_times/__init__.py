"""Seconds of the ops of one layer: by a roofline, or by a measured profile."""
