"""LayerNorm and RMSNorm."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.initialization import constant
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks


class Sum(NamedTuple):
    """The residual stream and the output of a layer, [..., width], as the input of a norm, which returns the sum, too.

    One pass computes both, and one their gradients.
    """

    residual: Tensor
    output: Tensor | None
    """None for a sum that is known."""
    multiplier: float


class _Norm(nn.Module):
    """A norm over the last dimension, scaled.

    Args:
        width: width of one head, or of a latent; None for the hidden state.
        of_heads: whether each rank has some of the vectors of a token.
        epsilon: None for the model's.
    """

    def __init__(
        self,
        model: ModelConfig,
        ranks: TensorParallelRanks,
        width: int | None = None,
        *,
        of_heads: bool = False,
        epsilon: float | None = None,
    ) -> None:
        super().__init__()
        self.one_plus, self.epsilon = model.apply_layernorm_1p, epsilon or model.layernorm_epsilon
        first = torch.full((width or model.hidden_size,), _first_weight(model))
        self.weight = ranks.replicated(first, of_heads=of_heads)


class LayerNorm(_Norm):
    """Zero mean and unit variance over the last dimension, scaled and shifted where there is a weight and a bias."""

    def __init__(
        self,
        model: ModelConfig,
        ranks: TensorParallelRanks,
        width: int | None = None,
        *,
        of_heads: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(model, ranks, width, of_heads=of_heads, **more)
        self.bias = None
        if model.normalization == "layernorm":
            self.bias = ranks.replicated(torch.zeros_like(self.weight.data), of_heads=of_heads)
        elif model.normalization == "layernorm-no-weights":
            self.weight, self.one_plus = None, False

    def forward(self, hidden: Tensor | Sum) -> Any:
        """[..., width] in, the same out; of a sum, the sum and its norm."""
        weight = self.weight + 1 if self.one_plus else self.weight
        if not isinstance(hidden, Sum):
            return F.layer_norm(hidden, hidden.shape[-1:], weight, self.bias, self.epsilon)
        if _norm_of_sum.is_compiled_on(hidden.residual.device):
            return _NormOfSum.apply(*hidden, (_layer_norm, _layer_norm_backward, (self.epsilon,)), weight, self.bias)
        residual, output, multiplier = hidden
        total = residual if output is None else torch.add(residual, output, alpha=multiplier)
        return total, F.layer_norm(total, total.shape[-1:], weight, self.bias, self.epsilon)


class RMSNorm(_Norm):
    """Unit mean square over the last dimension, scaled (Zhang and Sennrich, arXiv 1910.07467)."""

    def forward(self, hidden: Tensor | Sum) -> Any:
        """[..., width] in, the same out; of a sum, the sum and its norm."""
        return _rms_normed(self, hidden)


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
            normed = _rms_normed(self, channels)
        else:
            normed = _RMSNormOverRanks.apply(channels, self.weight, self.epsilon, self.one_plus, self.ranks)
        return normed.view_as(heads)


def _first_weight(model: ModelConfig) -> float:
    return 0.0 if model.apply_layernorm_1p else 1.0


def _rms_normed(norm: RMSNorm | AllHeadsRMSNorm, hidden: Tensor | Sum) -> Any:
    kind = _rms_norm, _rms_norm_backward, (norm.epsilon, norm.one_plus)
    if isinstance(hidden, Sum):
        return _NormOfSum.apply(*hidden, kind, norm.weight)
    return _NormOfSum.apply(hidden, None, 1.0, kind, norm.weight)[1]


class _NormOfSum(torch.autograd.Function):
    """Keeps the sum and the statistics of the norm; the gradient of the sum is added to the gradient of the norm.

    RMSNorm of torch keeps three tensors of the input's size on CPUs, where it has no kernel.
    """

    @staticmethod
    def forward(ctx, hidden, added, multiplier: float, kind: tuple[Any, ...], *weights):
        norm, ctx.backward_of_norm, settings = kind
        total, normed, *statistics = _norm_of_sum(hidden, added, multiplier, norm, *weights, *settings)
        ctx.save_for_backward(total, *weights, *statistics)
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.multiplier = settings[1:], None if added is None else multiplier
        return hidden if added is None else total, normed

    @staticmethod
    def backward(ctx, of_total, of_normed):
        more = *ctx.saved_tensors, *ctx.settings
        of_normed = torch.zeros_like(more[0]) if of_normed is None else of_normed
        of_hidden, *of_weights = _gradient_of_sum(of_normed, of_total, ctx.backward_of_norm, *more)
        of_added = of_hidden if ctx.multiplier in (None, 1) else of_hidden * ctx.multiplier
        return of_hidden, None if ctx.multiplier is None else of_added, None, None, *of_weights


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


def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    """The norm, and the inverse of each token's root mean square, [..., 1] in at least fp32."""
    inverse = torch.rsqrt(_mean_square(hidden) + epsilon)
    return _normed(hidden, inverse, weight, one_plus), inverse


def _rms_norm_backward(
    output_gradient: Tensor, hidden: Tensor, weight: Tensor, inverse: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor]:
    gradient, of_weight, along = _parts_of_gradient(output_gradient, hidden, weight, inverse, one_plus)
    return ((gradient - hidden * inverse * along) * inverse).to(hidden.dtype), of_weight


@Pointwise
def _norm_of_sum(hidden: Tensor, added: Tensor | None, multiplier: float, norm: Any, *more: Any) -> tuple[Tensor, ...]:
    total = hidden if added is None else torch.add(hidden, added, alpha=multiplier)
    return total, *norm(total, *more)


@Pointwise
def _gradient_of_sum(
    of_normed: Tensor, of_total: Tensor | None, backward_of_norm: Any, *more: Any
) -> tuple[Tensor, ...]:
    """Gradients of the sum and of the weights."""
    of_input, *of_weights = backward_of_norm(of_normed, *more)
    return of_input if of_total is None else of_total + of_input, *of_weights


def _layer_norm(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(hidden, hidden.shape[-1:], weight, bias, epsilon)


def _layer_norm_backward(
    output_gradient: Tensor, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    inputs = output_gradient, hidden, hidden.shape[-1:], *statistics, weight, bias
    return torch.ops.aten.native_layer_norm_backward(*inputs, [True, weight is not None, bias is not None])


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
    """Gradients of the input before it was scaled and of the weight, and the mean of the first along the input."""
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


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {
    **dict.fromkeys(("layernorm", "layernorm-no-bias", "layernorm-no-weights"), LayerNorm),
    "rmsnorm": RMSNorm,
}
"""Norms by their names in the model section."""
