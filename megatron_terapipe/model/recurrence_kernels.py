"""Convolution and recurrence of token mixers with a state: fused kernels where they are installed, else plain torch.

    gated delta net     flash-linear-attention    fp16 and bf16, keys of at most 256
    Mamba-2             mamba-ssm                 fp16, bf16 and fp32
    convolution         causal-conv1d             the same; 2 to 4 taps, channels in eights

All read a state and return one, and gradients flow through both. They are used on CUDA devices, where no document
begins within a token slice, and not with deterministic algorithms: some of their sums have no order. Before tensors of
a form are first given to a kernel, its results and gradients are compared with plain torch.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.plan.costs import CHUNK_TOKENS
from deepspeed_ext.runtime.attention.recurrences import causal_convolution, linear_attention

Results = tuple[Tensor, Tensor]
"""Outputs of the tokens, and the state after them."""


@dataclass(frozen=True, eq=False, slots=True)
class Kernel:
    """A computation in plain torch, and its fused kernel. The last tensor of either is the state before the tokens."""

    plain: Callable[..., Results]
    """With `begins`, whether a document begins at each token [B, N]; None if none does."""
    fused: Callable[..., Results]
    """With the function of the package first."""
    module: str
    function: str
    takes: Callable[..., bool]
    """Whether the kernel takes these tensors."""
    of_tokens: int
    """The first so many tensors are [B, N, ...] of N tokens."""
    device: str = "cuda"
    agreed: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    """Whether results agreed with plain torch, by the form of the tensors."""

    def __call__(self, *tensors: Tensor | None, begins: Tensor | None) -> Results:
        """Compute results by the fused kernel where it can be used."""
        given = [each for each in tensors if each is not None]
        if begins is None and all(each.device.type == self.device for each in given) and self._agrees(*tensors):
            return self.fused(self._installed(), *tensors)
        return self.plain(*tensors, begins=begins)

    def _installed(self) -> Any:
        return getattr(import_module(self.module), self.function)

    def _agrees(self, *tensors: Tensor | None) -> bool:
        """Whether the kernel can be used for such tensors."""
        if torch.are_deterministic_algorithms_enabled() or not self.takes(*tensors):
            return False
        form = tuple(None if each is None else (each.dtype, each.device, each.shape[2:]) for each in tensors)
        if form not in self.agreed:
            self.agreed[form] = False
            try:
                fused, plain = partial(self.fused, self._installed()), partial(self.plain, begins=None)
                few = [
                    each[:, : 2 * CHUNK_TOKENS] if index < self.of_tokens and each is not None else each
                    for index, each in enumerate(tensors)
                ]
                pairs = zip(_both_ways(fused, few), _both_ways(plain, few), strict=True)
                if not all((new - old).norm() <= 0.02 * old.norm() for new, old in pairs):
                    raise ValueError("its results differ from plain torch")
                self.agreed[form] = True
            except Exception as error:  # Compilers of kernels raise their own.
                if not isinstance(error, ModuleNotFoundError) or error.name != self.module.partition(".")[0]:
                    reason = str(error).partition("\n")[0] or type(error).__name__
                    warnings.warn(f"{self.module} is installed, but cannot be used: {reason}", stacklevel=2)
        return self.agreed[form]


def _both_ways(compute: Callable[..., Results], tensors: list[Tensor | None]) -> list[Tensor]:
    """Results, and the gradients of all tensors."""
    # The layer may run in a checkpoint, whose hooks would count the tensors saved here as tensors of the layer.
    unchanged = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), unchanged:
        leaves = [None if each is None else each.detach().requires_grad_() for each in tensors]
        leaves[-1] = torch.full_like(tensors[-1], 0.1).requires_grad_()  # A state of 0 would hide a wrong decay.
        results = compute(*leaves)
        given = [each for each in leaves if each is not None]
        towards = [torch.cos(each.detach()) for each in results]
        found = torch.autograd.grad(results, given, towards, materialize_grads=True)
    return [each.detach().to(torch.float32) for each in (*results, *found)]


def _plain_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor, *, begins: Tensor | None
) -> Results:
    return linear_attention(query, key, value, log_decay, state, rate=rate, begins=begins)


def _fused_delta_rule(
    function: Any, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> Results:
    repeats = value.shape[2] // key.shape[2]  # Older releases have no groups.
    query, key = (each.to(value.dtype).repeat_interleave(repeats, dim=2) for each in (query, key))
    return function(
        *(query, key, value.contiguous(), log_decay, rate.to(value.dtype)),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )


def _plain_state_space(
    values: Tensor, steps: Tensor, into: Tensor, out_of: Tensor, decay: Tensor, state: Tensor, *, begins: Tensor | None
) -> Results:
    """Mamba-2's values x [B, N, H, V], steps dt [B, N, H], B and C [B, N, G, K], and A [H], below 0."""
    values = values * steps.unsqueeze(-1)
    return linear_attention(out_of, into, values, steps * decay, state, begins=begins)


def _fused_state_space(
    function: Any, values: Tensor, steps: Tensor, into: Tensor, out_of: Tensor, decay: Tensor, state: Tensor
) -> Results:
    before = state.transpose(2, 3).contiguous()
    tensors = values, steps, decay, into, out_of
    output, after = function(*tensors, chunk_size=256, initial_states=before, return_final_states=True)
    return output, after.transpose(2, 3).to(state.dtype)


def _plain_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, *, begins: Tensor | None
) -> Results:
    """Causal convolution and SiLU of inputs [B, N, C], with taps [C, W] and a bias [C]."""
    outputs, after = causal_convolution(inputs, weight, before, begins)
    return F.silu(outputs if bias is None else outputs + bias), after


def _fused_convolution(function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Results:
    # In both the channels of a token lie side by side.
    outputs, after = function(
        *(inputs.contiguous().transpose(1, 2), weight, bias),
        initial_states=before.contiguous().transpose(1, 2),
        return_final_states=True,
        activation="silu",
    )
    return outputs.transpose(1, 2), after.transpose(1, 2)


_HALF = torch.float16, torch.bfloat16
_FLOATS = *_HALF, torch.float32

DELTA_RULE = Kernel(
    _plain_delta_rule,
    _fused_delta_rule,
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    lambda query, key, value, *_: value.dtype in _HALF and key.shape[3] <= 256,
    of_tokens=5,
)
STATE_SPACE = Kernel(
    _plain_state_space,
    _fused_state_space,
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    lambda values, *_: values.dtype in _FLOATS,
    of_tokens=4,
)
CONVOLUTION = Kernel(
    _plain_convolution,
    _fused_convolution,
    "causal_conv1d",
    "causal_conv1d_fn",
    lambda inputs, weight, *_: inputs.dtype in _FLOATS and weight.shape[1] in (2, 3, 4) and not inputs.shape[2] % 8,
    of_tokens=1,
)
