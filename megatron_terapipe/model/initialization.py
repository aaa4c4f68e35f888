"""How weights start."""

from math import sqrt

from torch import nn

from megatron_terapipe.tensor_parallel.linear import Initializer


def normal(std: float) -> Initializer:
    """Draw from a normal distribution around 0 (GPT-2: 0.02)."""
    return lambda weight: nn.init.normal_(weight, mean=0.0, std=std)


def scaled_normal(std: float, num_layers: int) -> Initializer:
    """As `normal`, but divided by sqrt(2 L): for weights whose output is added to the residual, twice in each layer.

    Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), section 2.3.
    """
    return normal(std / sqrt(2 * num_layers))
