"""Runs a plan on DeepSpeed: topology, module, state between token slices, communication, engine.

Independent of any particular model. Start with `initialize`, then `engine`.
"""

__all__ = [
    "attention",
    "clocks",
    "cuda_environment",
    "engine",
    "gradients",
    "health",
    "initialize",
    "launch",
    "micro_batch",
    "module",
    "state",
    "topology",
]
