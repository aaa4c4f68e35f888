"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the last dimension, scaled and shifted.

    Args:
        model: the model section.
        ranks: ranks that share the tokens.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.weight = ranks.replicated(torch.ones(model.hidden_size))
        self.bias = ranks.replicated(torch.zeros(model.hidden_size))
        self.epsilon = model.layernorm_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] in, the same out."""
        return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Unit mean square over the last dimension, scaled (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        model: the model section.
        ranks: ranks that share the tokens.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.weight = ranks.replicated(torch.ones(model.hidden_size))
        self.epsilon = model.layernorm_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] in, the same out."""
        return _RMSNorm.apply(hidden, self.weight, self.epsilon)


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and a number per token, where torch's own on CPUs keeps three tensors of the input's size."""

    @staticmethod
    def forward(ctx, hidden, weight, epsilon: float):
        at_least_fp32 = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        inverse = torch.rsqrt(at_least_fp32.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, inverse)
        return (at_least_fp32 * inverse).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx, output_gradient):
        hidden, weight, inverse = ctx.saved_tensors
        normed = hidden * inverse
        gradient = output_gradient.to(normed.dtype)
        of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight
        along = (gradient * normed).mean(-1, keepdim=True)
        of_hidden = (gradient - normed * along) * inverse
        return of_hidden.to(hidden.dtype), of_weight, None


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""Norms by their names in the model section."""
