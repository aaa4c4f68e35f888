"""What a run does in which order, found before it starts: costs of its ops, schedule and token slices."""
