"""The supported versions of torch and DeepSpeed, and the check of the installed ones."""

from importlib.metadata import version
from typing import Any

import torch
import torch.distributed
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from deepspeed_ext.plan.errors import UserError

SUPPORTED_DEEPSPEED = SpecifierSet(">=0.19.8,<0.20")
"""0.19.8 brought the schedule hooks this engine overrides; before 0.19.3 gradients of pipelines were wrong."""
SUPPORTED_TORCH = SpecifierSet(">=2.8")
"""Without an upper bound: the names below are checked instead."""

PRIVATE_NAMES = (
    "_C.PyTorchFileReader",
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_norm",
    "_utils._rebuild_tensor_v2",
    "_weights_only_unpickler._get_allowed_globals",
    "distributed.ProcessGroup._get_backend",
    "distributed.ProcessGroup._get_sequence_number_for_group",
    "distributed.distributed_c10d._get_default_store",
    "distributed.distributed_c10d._world.group_count",
    "distributed.distributed_c10d._world.pg_map",
    "distributed.distributed_c10d._world.pg_names",
    "ops.aten._efficient_attention_backward",
    "ops.aten._efficient_attention_forward",
    "ops.aten._flash_attention_backward",
    "ops.aten._flash_attention_forward",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Private names of torch that the code uses: a release may remove one. Those that are loaded late, for compiled
functions, are not listed."""


def check_versions() -> None:
    """Refuse versions of DeepSpeed and torch that are not supported."""
    deepspeed = version("deepspeed")
    if deepspeed not in SUPPORTED_DEEPSPEED:
        raise _refused("deepspeed", deepspeed, SUPPORTED_DEEPSPEED)
    # NVIDIA's builds call themselves alphas.
    if not SUPPORTED_TORCH.contains(torch.__version__, prereleases=True):
        raise _refused("torch", torch.__version__, SUPPORTED_TORCH)
    if missing := [name for name in PRIVATE_NAMES if not _has(torch, name)]:
        below = f"{SUPPORTED_TORCH},<{Version(torch.__version__).base_version}"
        raise UserError(
            f"torch {torch.__version__} has no torch.{missing[0]}, which the token-slice engine calls: "
            f"pip install 'torch{below}'"
        )


def _refused(package: str, installed: str, needed: SpecifierSet) -> UserError:
    return UserError(
        f"{package} {installed} is installed, and the token-slice engine needs {needed}: "
        f"pip install '{package}{needed}'"
    )


def _has(module: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True
