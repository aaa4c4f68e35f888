"""Runs a plan on DeepSpeed: topology, module, state between token slices, communication, engine.

Knows nothing of any particular model. Start with `initialize`, then `engine`.
"""

__all__ = [
    "batches",
    "cuda_environment",
    "engine",
    "gradients",
    "initialize",
    "launch",
    "ledger",
    "liveness",
    "module",
    "sequence",
    "topology",
]
