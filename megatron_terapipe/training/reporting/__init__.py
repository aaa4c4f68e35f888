"""Reporters of the numbers of a run: the log, a progress bar, the metrics file, TensorBoard, Weights & Biases."""
