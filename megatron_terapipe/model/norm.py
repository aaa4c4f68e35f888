"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
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
    """Keeps its input and a number per token.

    So does torch's own on CUDA. On CPUs torch has no kernel for it, and its autograd keeps three tensors of the input's
    size. Compiled, this one is one kernel forward on either.
    """

    @staticmethod
    def forward(ctx, hidden, weight, epsilon: float):
        normed, inverse = _rms_norm(hidden, weight, epsilon)
        ctx.save_for_backward(hidden, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx, output_gradient):
        return *_rms_norm_backward(output_gradient, *ctx.saved_tensors), None


@Pointwise
def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm, and the inverse of each token's root mean square, [..., 1] in at least fp32."""
    at_least_fp32 = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    inverse = torch.rsqrt(at_least_fp32.square().mean(-1, keepdim=True) + epsilon)
    return (at_least_fp32 * inverse).to(hidden.dtype) * weight, inverse


@Pointwise
def _rms_norm_backward(
    output_gradient: Tensor, hidden: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    normed = hidden * inverse
    gradient = output_gradient.to(normed.dtype)
    of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
    gradient = gradient * weight
    along = (gradient * normed).mean(-1, keepdim=True)
    of_hidden = (gradient - normed * along) * inverse
    return of_hidden.to(hidden.dtype), of_weight


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""Norms by their names in the model section."""
