"""The engines that are measured: ours, DeepSpeed's, torch's and plain torch, each with the same weights."""
