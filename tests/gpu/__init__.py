"""What `make gpu` proves on one CUDA device; see docs/gpu.md."""
