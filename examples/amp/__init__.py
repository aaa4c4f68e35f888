"""AMP's experiments: its clusters, its models, and the costs of DeepSpeed in its trials."""
