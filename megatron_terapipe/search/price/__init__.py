"""Time and memory of a strategy."""

__all__ = ["cost_model", "workload", "workload_files"]
