"""What `make gpu-bench` measures on one CUDA device; see docs/gpu.md."""
