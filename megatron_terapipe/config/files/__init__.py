"""Files of a run: data that it reads, checkpoints and metrics that it writes, and DeepSpeed's own settings."""
