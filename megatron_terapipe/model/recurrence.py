"""Token mixers with a state in place of attention: Mamba-2 and the gated delta net.

Both project each token, convolve the channels that become keys, queries and values with their own taps over W tokens,
and keep one matrix [K, V] for each head, as `linear_attention` describes. From token slice to token slice they carry
the last W - 1 inputs of the convolution, and the matrices.

    Mamba-2             Dao and Gu, arXiv 2405.21060 section 7     values dt x, keys B, queries C, decay of dt
    gated delta net     Yang et al., arXiv 2412.06464              values v, keys k, queries q, decay of a, rate of b

The rows of the projection are grouped: of a key head with its value heads. So tensor-parallel ranks, and
sequence-parallel ranks in between, share whole groups.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import Recurrence
from megatron_terapipe.model.initialization import constant, normal, uniform
from megatron_terapipe.model.recurrence_kernels import CONVOLUTION, DELTA_RULE, STATE_SPACE
from megatron_terapipe.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRanks

DECAYS = {"mamba2": (1.0, 16.0), "gated-delta-net": (0.01, 16.0)}
"""Range of the first factors of the decay, as mamba-ssm and transformers (Qwen3-Next) draw them."""
STEPS = (0.001, 0.1)
"""Range of Mamba-2's first steps."""


class Convolution(nn.Module):
    """Taps [C, W] of each channel, the last for the token itself; for Mamba-2 a bias [C]."""

    def __init__(self, channels: int, taps: int, ranks: TensorParallelRanks, *, bias: bool) -> None:
        super().__init__()
        drawn = uniform(-(taps**-0.5), taps**-0.5)  # as torch's Conv1d
        self.weight = ranks.parameter(channels, taps, cut=0, initialize=drawn)
        self.bias = ranks.parameter(channels, cut=0, initialize=drawn) if bias else None


class GatedNorm(nn.Module):
    """Norm of each head, of the model's kind, times the gate; for Mamba-2 RMSNorm of each group, of gated outputs."""

    def __init__(self, model: ModelConfig, recurrence: Recurrence, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.of_heads, self.epsilon = recurrence.kind == "gated-delta-net", model.layernorm_epsilon
        self.bias = None
        if self.of_heads:
            if model.normalization != "rmsnorm":
                self.bias = ranks.replicated(torch.zeros(recurrence.value_size), of_heads=True)
            self.weight = ranks.replicated(torch.ones(recurrence.value_size), of_heads=True)
        else:
            width = recurrence.num_heads * recurrence.value_size
            self.weight = ranks.parameter(width, cut=0, initialize=constant(1.0))

    def forward(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return [B, n, H V] for an output [B, n, H, V] and a gate [B, n, G, H / G V]."""
        dtype = gate.dtype
        gate = F.silu(gate.to(_exact(dtype)))
        if self.of_heads:
            norm = F.rms_norm if self.bias is None else F.layer_norm
            normed = norm(output.to(gate.dtype), output.shape[-1:], eps=self.epsilon) * self.weight
            if self.bias is not None:
                normed = normed + self.bias
            return (normed.flatten(2) * gate.flatten(2)).to(dtype)
        gated = output.flatten(2).view_as(gate) * gate
        return (F.rms_norm(gated, gate.shape[-1:], eps=self.epsilon).flatten(2) * self.weight).to(dtype)


class RecurrentMixer(nn.Module):
    """Projection, convolution, recurrence, norm with a gate, projection.

    The backward computes the parts between both projections again: their decays among the tokens of a chunk are several
    times as large as their inputs.
    """

    def __init__(self, model: ModelConfig, recurrence: Recurrence, ranks: TensorParallelRanks) -> None:
        super().__init__()
        self.recurrence, heads, groups = recurrence, recurrence.num_heads, recurrence.num_groups
        self.heads_of_group, self.is_delta_net = heads // groups, recurrence.kind == "gated-delta-net"
        values = self.heads_of_group * recurrence.value_size
        channels = values + 2 * recurrence.key_size
        # Of each group: what is convolved and the gate, and then steps and rates of its heads.
        self.widths = [values, channels, self.heads_of_group]
        if self.is_delta_net:
            self.widths = [channels, values, 2 * self.heads_of_group]
        rows, first, last = (
            groups * sum(self.widths),
            normal(model.init_method_std),
            normal(model.output_layer_init_std),
        )
        self.in_projection = ColumnParallelLinear(model.hidden_size, rows, ranks, first, bias=False)
        self.convolution = Convolution(groups * channels, recurrence.conv_size, ranks, bias=not self.is_delta_net)
        self.decay = ranks.parameter(heads, cut=0, initialize=uniform(*DECAYS[recurrence.kind], torch.log))
        steps = constant(1.0) if self.is_delta_net else uniform(*map(math.log, STEPS), _before_softplus)
        self.time_bias = ranks.parameter(heads, cut=0, initialize=steps)
        self.skip = None if self.is_delta_net else ranks.parameter(heads, cut=0, initialize=constant(1.0))
        self.norm = GatedNorm(model, recurrence, ranks)
        self.projection = RowParallelLinear(groups * values, model.hidden_size, ranks, last, bias=False)

    def forward(
        self, hidden: Tensor, past: Past, recomputed: nn.Module | None = None, *, completed: bool = True
    ) -> Tensor:
        """Mix tokens: [B, n, hidden] of the tokens that this rank has between the matrices in, the same out.

        `recomputed` and `completed` are as in `RowParallelLinear`, of the norm before and of the projection.
        """
        groups = self.in_projection(hidden, recomputed).unflatten(-1, (-1, sum(self.widths)))
        convolved, gate, steps = groups.split(self.widths, dim=-1)
        if not self.is_delta_net:
            convolved, gate = gate, convolved
        convolved, steps = past.all_tokens(convolved, steps)
        sizes, inputs = self.recurrence, convolved.flatten(2)
        rows, heads = inputs.shape[0], steps.shape[2] * self.heads_of_group
        window = past.carried("window", inputs.new_zeros(rows, sizes.conv_size - 1, inputs.shape[2]))
        none = inputs.new_zeros(rows, heads, sizes.key_size, sizes.value_size, dtype=_exact(inputs.dtype))
        weights = [self._own(past, each) for each in (*self.convolution.parameters(), self.decay, self.time_bias)]
        more = [] if self.skip is None else [self._own(past, self.skip)]
        mix = self._delta_net if self.is_delta_net else self._state_space
        state, begins = past.carried("state", none), past.begins(inputs.device)
        output, window, state = _computed_again(mix, inputs, steps, window, state, begins, *weights, *more)
        past.carry("window", window)
        past.carry("state", state)
        normed = _computed_again(self.norm, past.own_tokens(output), gate)
        return self.projection(normed, completed=completed)

    def _own(self, past: Past, weight: Tensor) -> Tensor:
        """The rows of a weight for the groups that this rank has between exchanges."""
        num_groups = self.in_projection.weight.shape[0] // sum(self.widths)
        return past.own_heads(weight.unflatten(0, (num_groups, -1))).flatten(0, 1)

    def _state_space(
        self, inputs: Tensor, steps: Tensor, window: Tensor, state: Tensor, begins: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mamba-2: output [B, N, H, V], and both states after the tokens, for inputs [B, N, C], steps [B, N, G, h]."""
        taps, bias, decay, time_bias, skip = weights
        convolved, window = CONVOLUTION(inputs, taps, bias, window, begins=begins)
        sizes = self.recurrence
        values, into, out_of = convolved.unflatten(2, (steps.shape[2], -1)).split(
            [self.widths[0], sizes.key_size, sizes.key_size], dim=-1
        )
        values = values.flatten(2).unflatten(2, (-1, sizes.value_size))
        steps = F.softplus(steps.flatten(2).to(state.dtype) + time_bias)
        rates = -decay.to(state.dtype).exp()
        output, state = STATE_SPACE(values, steps, into, out_of, rates, state, begins=begins)
        return (output + values * skip.unsqueeze(-1)).to(inputs.dtype), window, state

    def _delta_net(
        self, inputs: Tensor, steps: Tensor, window: Tensor, state: Tensor, begins: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gated delta net: as `_state_space`, with rates and steps [B, N, G, 2 h]."""
        taps, decay, time_bias = weights
        convolved, window = CONVOLUTION(inputs, taps, None, window, begins=begins)
        sizes, exact = self.recurrence, state.dtype
        query, key, value = convolved.unflatten(2, (steps.shape[2], -1)).split(
            [sizes.key_size, sizes.key_size, self.widths[1]], dim=-1
        )
        query = _unit(query.to(exact)) * sizes.key_size**-0.5
        value = value.flatten(2).unflatten(2, (-1, sizes.value_size))
        rate, step = (each.flatten(2).to(exact) for each in steps.chunk(2, dim=-1))
        log_decay = -decay.to(exact).exp() * F.softplus(step + time_bias)
        of_tokens = query, _unit(key.to(exact)), value, log_decay, rate.sigmoid()
        output, state = DELTA_RULE(*of_tokens, state, begins=begins)
        return output.to(inputs.dtype), window, state


def _computed_again(compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
    """Compute results of tensors, and in the backward again, so that nothing in between is kept."""
    if not torch.is_grad_enabled():
        return compute(*tensors)
    return checkpoint(compute, *tensors, use_reentrant=False, preserve_rng_state=False)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _unit(heads: Tensor) -> Tensor:
    """Heads [..., K] of length 1; as flash-linear-attention, with a number added to the square."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


def _before_softplus(logarithms: Tensor) -> Tensor:
    """The numbers whose softplus has these logarithms."""
    steps = logarithms.exp()
    return steps + torch.log(-torch.expm1(-steps))
