"""The optimizer, and which parameters decay."""

from collections.abc import Iterable

import torch
from torch import nn

from megatron_terapipe.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Torch's AdamW or SGD over two groups: matrices decay; biases and norms do not, as in Megatron.

    Args:
        config: the optimizer section.
        parameters: of this rank's stage.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    # The fused step is one pass over the state, on CPUs as on GPUs.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use a learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
