"""NVIDIA apex, where it is installed. PyPI's package of that name is another one (docs/adr/0008)."""

from importlib import import_module
from typing import Any

import torch


def apex_fused_adam() -> Any | None:
    """The class of NVIDIA apex, or None where it is not, or cannot run."""
    if not torch.cuda.is_available():
        return None
    try:
        # The kernels are an extension of their own: apex may be installed without it.
        import_module("amp_C")
        return import_module("apex.optimizers").FusedAdam
    except Exception:  # The other apex, or one built for another torch, may fail in any way.
        return None
