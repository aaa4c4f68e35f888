"""AMP's experiments: its clusters, its models, and what DeepSpeed costs as its trials ran it."""
