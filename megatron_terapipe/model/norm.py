"""LayerNorm and RMSNorm."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.initialization import constant
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks


class _Norm(nn.Module):
    """A norm over the last dimension, scaled.

    Args:
        head_width: width of one head, where heads are normed each; None for the hidden state.
    """

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, head_width: int | None = None) -> None:
        super().__init__()
        width, self.one_plus = head_width or model.hidden_size, model.apply_layernorm_1p
        self.weight = ranks.replicated(torch.full((width,), _first_weight(model)), of_heads=head_width is not None)
        self.epsilon = model.layernorm_epsilon


class LayerNorm(_Norm):
    """Zero mean and unit variance over the last dimension, scaled and shifted."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, head_width: int | None = None) -> None:
        super().__init__(model, ranks, head_width)
        self.bias = ranks.replicated(torch.zeros_like(self.weight.data), of_heads=head_width is not None)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] in, the same out."""
        weight = self.weight + 1 if self.one_plus else self.weight
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.epsilon)


class RMSNorm(_Norm):
    """Unit mean square over the last dimension, scaled (Zhang and Sennrich, arXiv 1910.07467)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] in, the same out."""
        return _RMSNorm.apply(hidden, self.weight, self.epsilon, self.one_plus)


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over the channels of all heads together, of which each rank has some (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, num_heads: int) -> None:
        super().__init__()
        self.ranks, self.one_plus = ranks, model.apply_layernorm_1p
        first = constant(_first_weight(model))
        self.weight = ranks.parameter(num_heads * model.kv_channels, cut=0, initialize=first)
        self.epsilon = model.layernorm_epsilon

    def forward(self, heads: Tensor) -> Tensor:
        """[B, N, heads, D] of this rank's heads in, the same out."""
        channels = heads.flatten(-2)
        if self.ranks.size == 1:
            normed = _RMSNorm.apply(channels, self.weight, self.epsilon, self.one_plus)
        else:
            normed = _RMSNormOverRanks.apply(channels, self.weight, self.epsilon, self.one_plus, self.ranks)
        return normed.view_as(heads)


def _first_weight(model: ModelConfig) -> float:
    return 0.0 if model.apply_layernorm_1p else 1.0


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and a number per token.

    So does torch's own on CUDA. On CPUs torch has no kernel for it, and its autograd keeps three tensors of the input's
    size. Compiled, this one is one kernel forward on either.
    """

    @staticmethod
    def forward(ctx, hidden, weight, epsilon: float, one_plus: bool):
        normed, inverse = _rms_norm(hidden, weight, epsilon, one_plus)
        ctx.save_for_backward(hidden, weight, inverse)
        ctx.one_plus = one_plus
        return normed

    @staticmethod
    def backward(ctx, output_gradient):
        return *_rms_norm_backward(output_gradient, *ctx.saved_tensors, ctx.one_plus), None, None


class _RMSNormOverRanks(torch.autograd.Function):
    """RMSNorm where each rank has as many of the channels: the ranks' means are averaged, forward and backward."""

    @staticmethod
    def forward(ctx, hidden, weight, epsilon: float, one_plus: bool, ranks: TensorParallelRanks):
        mean_square = ranks.start_sum(_part_of_mean(hidden).div_(ranks.size))()
        inverse = torch.rsqrt(mean_square + epsilon)
        ctx.save_for_backward(hidden, weight, inverse)
        ctx.one_plus, ctx.ranks = one_plus, ranks
        return _with_known_mean(hidden, inverse, weight, one_plus)

    @staticmethod
    def backward(ctx, output_gradient):
        hidden, weight, inverse = ctx.saved_tensors
        gradient, of_weight, along = _with_own_mean(output_gradient, hidden, weight, inverse, ctx.one_plus)
        along = ctx.ranks.start_sum(along.div_(ctx.ranks.size))()
        return _across(gradient, hidden, inverse, along), of_weight, None, None, None


@Pointwise
def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    """The norm, and the inverse of each token's root mean square, [..., 1] in at least fp32."""
    inverse = torch.rsqrt(_mean_square(hidden) + epsilon)
    return _normed(hidden, inverse, weight, one_plus), inverse


@Pointwise
def _rms_norm_backward(
    output_gradient: Tensor, hidden: Tensor, weight: Tensor, inverse: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    gradient, of_weight, along = _parts_of_gradient(output_gradient, hidden, weight, inverse, one_plus)
    return ((gradient - hidden * inverse * along) * inverse).to(hidden.dtype), of_weight


def _mean_square(hidden: Tensor) -> Tensor:
    """The mean square of each token, [..., 1] in at least fp32."""
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32)).square().mean(-1, keepdim=True)


def _normed(hidden: Tensor, inverse: Tensor, weight: Tensor, one_plus: bool) -> Tensor:
    """The norm, from the inverse of each token's root mean square."""
    normed = hidden * inverse
    # 1 + weight has more digits than a half-precision weight.
    return (normed * (1 + weight.to(normed.dtype))).to(hidden.dtype) if one_plus else normed.to(hidden.dtype) * weight


def _parts_of_gradient(
    output_gradient: Tensor, hidden: Tensor, weight: Tensor, inverse: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input before it was scaled, that of the weight, and the mean of the first along the input."""
    normed = hidden * inverse
    gradient = output_gradient.to(normed.dtype)
    of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
    gradient = gradient * (1 + weight.to(normed.dtype) if one_plus else weight)
    return gradient, of_weight, (gradient * normed).mean(-1, keepdim=True)


_part_of_mean, _with_known_mean, _with_own_mean = map(Pointwise, (_mean_square, _normed, _parts_of_gradient))


@Pointwise
def _across(gradient: Tensor, hidden: Tensor, inverse: Tensor, along: Tensor) -> Tensor:
    """The gradient of the input: without its part along the input, which the norm takes away."""
    return ((gradient - hidden * inverse * along) * inverse).to(hidden.dtype)


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""Norms by their names in the model section."""
