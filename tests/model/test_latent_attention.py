"""Latents kept in place of keys and values: the same output and gradients, few heads at a time, in documents, in bf16.

`test_block.py` compares keys and values that are kept with attention written out, and the equivalence ladder compares
both on ranks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measuring.closed_forms import key_value_bytes_per_token
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import latent_attention
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.model.attention import LatentAttention
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import MODELS, SEQ
from tests.model.plain import hidden_state, in_token_slices, random_weights

STARTS = ((0, 5, 13, 14), (0, 20))


def layers_of(name: str, **more: Any) -> tuple[LatentAttention, LatentAttention]:
    """One layer that keeps keys and values, and one that keeps latents, of equal weights."""
    model = MODELS[name]
    made = [LatentAttention(model, model.blocks[0], TensorParallelRanks(), latents_kept=kept) for kept in (False, True)]
    expanded, latent = (random_weights(each) for each in made)
    return expanded, latent


def output_and_gradients(layer: LatentAttention, hidden: Tensor, cut: tuple[int, ...], **more: Any) -> list[Tensor]:
    output = in_token_slices(layer, hidden, cut, **more)
    direction = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad(output, [hidden, *layer.parameters()], direction)]


@pytest.mark.parametrize("starts", [None, STARTS], ids=["whole", "documents"])
@pytest.mark.parametrize("at_once", [2**27, 700], ids=["all_heads", "few_heads"])
@pytest.mark.parametrize("cut", [(SEQ,), (13, 1, 18)], ids=str)
@pytest.mark.parametrize("name", ["deepseek_like", "minicpm3_like"])
def test_latents_kept_change_no_result(
    name: str, cut: tuple[int, ...], at_once: int, starts: tuple[tuple[int, ...], ...] | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(latent_attention, "EXPANDED_AT_ONCE", at_once)
    documents = None if starts is None else Documents(starts)
    hidden = hidden_state(32, SEQ).requires_grad_()
    expanded, latent = (output_and_gradients(each, hidden, cut, documents=documents) for each in layers_of(name))
    for one, other in zip(expanded, latent, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12 * one.abs().max().item())


def test_sums_over_heads_and_token_slices_are_in_fp32() -> None:
    """In bf16 the gradients differ from those of keys and values by roundings of a few products."""
    hidden = hidden_state(32, SEQ).bfloat16().requires_grad_()
    found = [output_and_gradients(each.bfloat16(), hidden, (13, 1, 18)) for each in layers_of("deepseek_like")]
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 2e-2 * one.norm()


@pytest.mark.parametrize("kept", [False, True], ids=["expanded", "latents"])
def test_bytes_of_a_token_that_later_token_slices_read(kept: bool) -> None:
    model, layer = MODELS["deepseek_like"], layers_of("deepseek_like")[kept]
    state = SequenceState(TokenSlices((20, 12)), sequences=(0, 1))
    layer(hidden_state(32, SEQ)[:, :20], state.past(0, 0))
    tensors = state.keys_and_values(0, None).read(0, 20)
    of_token = key_value_bytes_per_token(model, model.blocks[0], 8, latents_kept=kept)
    assert sum(each.nbytes for each in tensors) == 2 * 20 * of_token
