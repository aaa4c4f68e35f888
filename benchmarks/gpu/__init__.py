"""The measurements of `make gpu-bench` on one CUDA device; see docs/how-to/gpu.md."""
