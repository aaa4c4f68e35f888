"""What `make gpu` proves on one CUDA device; see docs/how-to/gpu.md."""
