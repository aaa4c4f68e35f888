"""The plan of a run, found before it starts: costs of its ops, schedule and token slices."""
