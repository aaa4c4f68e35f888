"""The optimizer, and what changes in it from step to step."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch

from megatron_terapipe.config.optimizer import OptimizerConfig


def apex_fused_adam() -> Any | None:
    """Return FusedAdam of NVIDIA apex; None if it is not installed or cannot run.

    The package `apex` of PyPI is another one (docs/adr/0008).
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
"""Entry of a group of parameters: by what the weight decay is multiplied in it."""


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices decay; biases and norms do not, as in Megatron.

    Args:
        config: the optimizer section.
        named_parameters: parameters by name of this rank's stage.
    """
    decaying, others = [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            (decaying if _decays(name, parameter) else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": factor * config.weight_decay, DECAY_FACTOR: factor}
        for parameters, factor in ((decaying, 1.0), (others, 0.0))
        if parameters
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    fused_adam = apex_fused_adam()
    if fused_adam is not None:
        return fused_adam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    # The fused step is one pass over the state, on CPUs as on GPUs.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def set_step_sizes(optimizer: torch.optim.Optimizer, *, learning_rate: float, weight_decay: float) -> None:
    """Use a learning rate and a weight decay from the next step on.

    Args:
        optimizer: the optimizer.
        learning_rate: learning rate of every parameter.
        weight_decay: weight decay of the parameters that decay.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay * group[DECAY_FACTOR]


def _decays(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is a matrix. The bias of two matrices side by side has two axes, too."""
    return parameter.dim() > 1 and not name.endswith("bias")
