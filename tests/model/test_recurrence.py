"""Mamba-2 and the gated delta net: in token slices and by documents, beside a loop over tokens.

`tests/huggingface` compares logits and gradients with transformers.
"""

import itertools
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.recurrences import linear_attention
from deepspeed_ext.runtime.state.carried_states import CarriedStates
from megatron_terapipe.config.flops import state_bytes
from megatron_terapipe.config.layers import Recurrence
from megatron_terapipe.model.recurrence import RecurrentMixer
from megatron_terapipe.model.recurrence_kernels import DELTA_RULE
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import model_config
from tests.model.plain import hidden_state, in_token_slices, random_weights, recurrence

SIZES = {"num_heads": 4, "num_groups": 2, "key_size": 6, "value_size": 8, "conv_size": 4}
KINDS = {kind: Recurrence(kind=kind, **SIZES) for kind in ("mamba2", "gated-delta-net")}
MODEL = model_config()
LENGTH = 150


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("norm", "starts"),
    [("layernorm", None), ("rmsnorm", ((0, 2, 70), (0, 64, 65, 66, 149)))],
    ids=["whole", "documents"],
)
def test_token_slices_and_documents_equal_a_loop_over_tokens(
    kind: str, norm: str, starts: tuple[tuple[int, ...], ...] | None
) -> None:
    layer = random_weights(RecurrentMixer(replace(MODEL, normalization=norm), KINDS[kind], TensorParallelRanks()))
    documents = None if starts is None else Documents(starts, LENGTH)
    expected_of, found_of = (hidden_state(MODEL.hidden_size, LENGTH).requires_grad_() for _ in range(2))
    rows = []
    for row, begins in enumerate(starts or ((0,), (0,))):
        bounds = itertools.pairwise((*begins, LENGTH))
        pieces = [recurrence(layer, expected_of[row : row + 1, begin:end]) for begin, end in bounds]
        rows.append(torch.cat(pieces, dim=1))
    expected, weights = torch.cat(rows), list(layer.parameters())
    found = in_token_slices(layer, found_of, (1, 66, 2, 81), documents=documents)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    whole = in_token_slices(layer, found_of, (LENGTH,), documents=documents)
    direction = torch.cos(expected.detach())
    wanted = torch.autograd.grad(expected, [expected_of, *weights], direction)
    for one, other in zip(wanted, torch.autograd.grad(whole, [found_of, *weights], direction), strict=True):
        assert (one - other).norm() <= 1e-11 * one.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_state_bytes_are_those_that_a_token_slice_leaves(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(CarriedStates, "leave", lambda self, name, token_slice, state: left.append(state.nbytes))
    layer = RecurrentMixer(MODEL, KINDS[kind], TensorParallelRanks()).to(dtype)
    hidden = hidden_state(MODEL.hidden_size, LENGTH).to(dtype)
    in_token_slices(layer, hidden, (LENGTH,))
    assert sum(left) == len(hidden) * state_bytes(KINDS[kind], dtype.itemsize)


@pytest.mark.parametrize("wrong", [False, True])
def test_fused_kernels_are_used_after_they_gave_the_results_of_plain_torch(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, with plain torch in the place of the package."""

    def package(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, **more):
        calls.append(query.shape[1])
        state = more["initial_state"].detach() if wrong else more["initial_state"]
        output, state = linear_attention(query, key, value, decay, state, rate=rate)
        return output.to(value.dtype), state

    calls: list[int] = []
    kernel = replace(DELTA_RULE, agreed={}, module="fla.ops", device="cpu")
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace(chunk_gated_delta_rule=package))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 200, 2, 8, generator=generator).div(3)
    value = torch.randn(1, 200, 4, 8, generator=generator).bfloat16()
    decay, rate = -torch.rand(1, 200, 4, generator=generator), torch.rand(1, 200, 4, generator=generator)
    tensors = query, key, value, decay, rate, torch.zeros(1, 4, 8, 8)
    expected, _ = kernel.plain(*tensors, begins=None)
    with pytest.warns(UserWarning, match="cannot be used: its results differ") if wrong else nullcontext():
        found, _ = kernel(*tensors, begins=None)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    assert calls == ([128] if wrong else [128, 200])
    kernel(query, key, value.float(), *tensors[3:], begins=None)
    kernel(*tensors, begins=torch.zeros(1, 200, dtype=torch.bool))
    kernel(*tensors, begins=None)
    assert calls == ([128] if wrong else [128, 200, 200])
    # Also where the first use is in a checkpoint, as in the layers.
    value.requires_grad_()
    again = replace(kernel, agreed={})
    with pytest.warns(UserWarning, match="cannot be used") if wrong else nullcontext():
        output, _ = checkpoint(partial(again, begins=None), *tensors, use_reentrant=False)
    (found,) = torch.autograd.grad(output.float().sum(), value)
    (expected,) = torch.autograd.grad(kernel.plain(*tensors, begins=None)[0].float().sum(), value)
    assert (found - expected).norm() <= 0.02 * expected.norm()
