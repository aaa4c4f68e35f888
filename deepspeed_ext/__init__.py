"""A pipeline with token slices, on DeepSpeed.

`deepspeed_ext.plan` computes the order of work in a pipeline and is pure; `deepspeed_ext.runtime` runs that order
on DeepSpeed. Importing this package imports neither torch nor deepspeed.
"""

__all__ = ["plan", "runtime"]

__version__ = "0.1.0"
