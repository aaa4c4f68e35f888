"""Layers see positions and earlier tokens as if the sequence had never been cut."""

import pytest
import torch
from torch import Tensor

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.inference.whole_model import WholeModel
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import PositionEmbedding
from tests.model.configs import MODELS, SEQ, model_config

CUTS = [(SEQ,), (8, 8, 8, 8), (13, 1, 18)]


def in_token_slices(layer: torch.nn.Module, hidden: Tensor, cut: tuple[int, ...]) -> Tensor:
    token_slices = TokenSlices(cut)
    state = SequenceState(token_slices)
    parts = [
        layer(hidden[:, start:end], past=state.past(0, index))
        for index, (start, end) in enumerate(token_slices.bounds())
    ]
    return torch.cat(parts, dim=1)


def hidden_state(seed: int = 0) -> Tensor:
    return torch.randn(2, SEQ, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(attention: SelfAttention, hidden: Tensor) -> Tensor:
    """Attention one head at a time, with a matrix of scores."""
    projected = hidden @ attention.query_key_value.weight.T + attention.query_key_value.bias
    heads, groups = attention.num_heads, attention.num_groups
    columns = projected.split(attention.head_size, dim=-1)
    outputs = []
    for head in range(heads):
        group = heads + head // (heads // groups)
        query, key, value = columns[head], columns[group], columns[group + groups]
        scores = query @ key.transpose(1, 2) / attention.head_size**0.5
        scores = scores.masked_fill(torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1), float("-inf"))
        outputs.append(scores.softmax(-1) @ value)
    return torch.cat(outputs, -1) @ attention.projection.weight.T + attention.projection.bias


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_attention_is_causal_attention_whatever_the_cut(model: ModelConfig, cut: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(model).double()
    with torch.no_grad():
        attention.query_key_value.weight *= 20  # far from uniform
        attention.query_key_value.bias.normal_()
        found = in_token_slices(attention, hidden_state(), cut)
        torch.testing.assert_close(found, written_out(attention, hidden_state()), rtol=1e-12, atol=1e-13)


def test_a_block_adds_attention_and_mlp_to_the_residual_stream() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(model_config()).double()
    hidden = hidden_state()
    with torch.no_grad():
        after_attention = hidden + written_out(block.attention, block.attention_norm(hidden))
        wide = block.mlp_norm(after_attention) @ block.mlp.up.weight.T
        activated = 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
        expected = after_attention + activated @ block.mlp.down.weight.T  # biases start at 0
        torch.testing.assert_close(in_token_slices(block, hidden, (13, 1, 18)), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_positions_count_from_the_start_of_the_sequence(cut: tuple[int, ...]) -> None:
    embedding = PositionEmbedding(model_config(max_position_embeddings=SEQ + 5)).double()
    hidden = hidden_state()
    assert torch.equal(in_token_slices(embedding, hidden, cut), hidden + embedding.weight[:SEQ])


def test_position_gradients_reach_the_rows_that_were_used() -> None:
    embedding = PositionEmbedding(model_config(max_position_embeddings=SEQ + 5)).double()
    in_token_slices(embedding, hidden_state(), (13, 1, 18)).sum().backward()
    assert torch.all(embedding.weight.grad[:SEQ] == 2)  # rows of the micro-batch
    assert torch.all(embedding.weight.grad[SEQ:] == 0)


def test_a_later_token_changes_no_earlier_logit() -> None:
    model = WholeModel(model_config()).double()
    tokens = torch.randint(0, 257, (1, SEQ), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 257
    with torch.no_grad():
        before, after = (model(each, SequenceState(TokenSlices((SEQ,)))) for each in (tokens, changed))
    assert torch.equal(before[:, :20], after[:, :20])
    assert torch.all((before[:, 20:] - after[:, 20:]).abs().amax(-1) > 0)
