"""The optimizer, and its settings that change from step to step."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from megatron_terapipe.config.training import OptimizerConfig
from megatron_terapipe.model.embedding import AT_AN_END


def apex_fused_adam() -> Any | None:
    """Return FusedAdam of NVIDIA apex; None if it is not installed or cannot run.

    The package `apex` of PyPI is another one.
    """
    if not torch.cuda.is_available():
        return None
    try:
        # The kernels are an extension of their own: apex may be installed without it.
        import_module("amp_C")
        return import_module("apex.optimizers").FusedAdam
    except Exception:  # The other apex, or one built for another torch, may fail in any way.
        return None


DECAY_FACTOR = "weight_decay_factor"
"""Entry of a group of parameters: factor of the weight decay."""
APART = "learning_rate_apart"
"""Entry of a group of parameters: whether it has the word embedding and the output layer."""


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """AdamW or SGD over groups: matrices decay; biases and norms do not, as in Megatron, but for norms of heads if set.

    With `--decoupled-lr` the word embedding and the output layer are a group of their own.
    """
    by_kind: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            apart = config.decoupled_lr is not None and hasattr(parameter, AT_AN_END)
            of_heads = config.apply_wd_to_qk_layernorm and ("query_norm." in name or "key_norm." in name)
            by_kind.setdefault((float(of_heads or _decays(name, parameter)), apart), []).append(parameter)
    # In the same order on all ranks.
    groups: list[dict[str, Any]] = [
        {
            "params": by_kind[decay, apart],
            "lr": config.ends[0] if apart else config.lr,
            "weight_decay": decay * config.weight_decay,
            DECAY_FACTOR: decay,
            APART: apart,
        }
        for decay, apart in sorted(by_kind, key=lambda kind: (-kind[0], kind[1]))
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    fused_adam = apex_fused_adam()
    if fused_adam is not None:
        return fused_adam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    # The fused step is one pass over the state, on CPUs as on GPUs.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def set_step_sizes(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, of_ends: float, weight_decay: float
) -> None:
    """Use a learning rate and a weight decay from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = of_ends if group[APART] else learning_rate
        group["weight_decay"] = weight_decay * group[DECAY_FACTOR]


def _decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is a matrix. The bias of two adjacent matrices has two axes, too."""
    return parameter.dim() > 1 and not name.endswith("bias")
