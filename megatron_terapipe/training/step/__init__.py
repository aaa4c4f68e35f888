"""A step: its micro-batches, learning rate, weight decay, optimizer, and measurements."""
