"""Time and memory of a strategy."""

__all__ = ["cost_model", "prediction", "workload", "workload_files"]
