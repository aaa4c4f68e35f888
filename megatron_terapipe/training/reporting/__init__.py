"""Where the numbers of a run go: the log, a progress bar, the metrics file, TensorBoard, Weights & Biases."""
