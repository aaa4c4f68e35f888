"""Attention in token slices is that of the whole sequence, within each document."""

import pytest
import torch
from torch import Tensor

from deepspeed_ext.runtime.attention.documents import Documents
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import MODELS, SEQ, llama_config
from tests.model.plain import hidden_state, in_token_slices, random_weights

CUTS = [(SEQ,), (8, 8, 8, 8), (13, 1, 18)]
STARTS = ((0, 5, 13, 14), (0, 20))


def attention_of(model: ModelConfig) -> tuple[SelfAttention, BlockShape]:
    block = model.blocks[0]
    layer = random_weights(SelfAttention(model, block, TensorParallelRanks()))
    with torch.no_grad():
        layer.query_key_value.weight *= 2  # far from uniform
    return layer, block


def assert_same_with_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    coefficients = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    of_found, of_expected = (torch.autograd.grad((each * coefficients).sum(), inputs) for each in (found, expected))
    scale = max(gradient.abs().max().item() for gradient in of_expected)
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12 * scale)


def test_documents_with_continued_positions_differ_only_by_rotations() -> None:
    """A rotation of a whole document by its start changes no score."""
    layer, _ = attention_of(llama_config())
    hidden = hidden_state(32, SEQ)
    restarting, continued = (
        in_token_slices(layer, hidden, (13, 1, 18), documents=Documents(STARTS, positions_restart=restart))
        for restart in (True, False)
    )
    torch.testing.assert_close(restarting, continued, rtol=1e-10, atol=1e-11)


def test_without_positions_tokens_are_a_set() -> None:
    """The output of the last token does not depend on the order of those before; with rotations it does."""
    order = [*torch.randperm(SEQ - 1, generator=torch.Generator().manual_seed(0)).tolist(), SEQ - 1]
    hidden = hidden_state(32, SEQ)
    for name, alike in [("no_positions", True), ("llama", False)]:
        layer, _ = attention_of(MODELS[name])
        found, shuffled = (in_token_slices(layer, each, (SEQ,))[:, -1] for each in (hidden, hidden[:, order]))
        assert torch.allclose(found, shuffled, rtol=1e-12, atol=1e-13) == alike


@pytest.mark.parametrize("group", [0, 1])
def test_a_key_head_reaches_only_its_own_query_heads(group: int) -> None:
    """Rows are grouped: of the 2 x (2 + 2) heads of 8, a group's key and value are the last two."""
    model = llama_config()
    layer, _ = attention_of(model)
    layer.projection.weight.data = torch.eye(32, dtype=torch.float64)
    hidden = hidden_state(32, SEQ)
    before = in_token_slices(layer, hidden, (SEQ,))
    with torch.no_grad():
        layer.query_key_value.weight[group * 32 + 16 : (group + 1) * 32] *= 2
    changed = (in_token_slices(layer, hidden, (SEQ,)) - before).unflatten(-1, (4, 8)).abs().amax((0, 1, 3)) > 0
    assert changed.tolist() == [group == 0, group == 0, group == 1, group == 1]
