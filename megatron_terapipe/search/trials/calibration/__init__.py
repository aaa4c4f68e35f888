"""Calibration: the constants of the cost model that measured runs make most probable, and their uncertainty."""
