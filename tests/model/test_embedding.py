"""Both ends of the model: words and positions, logits, and vocabulary stages, which together are the output layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.runtime.attention.documents import Documents
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import output_layer
from megatron_terapipe.model.embedding import OutputLayer, PositionEmbedding, VocabularySums, WordEmbedding, tied_logits
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model import plain
from tests.model.configs import SEQ, model_config
from tests.model.plain import hidden_state, in_token_slices

CUTS = [(SEQ,), (8, 8, 8, 8), (13, 1, 18)]
ALONE = TensorParallelRanks()
STARTS = ((0, 5, 13, 14), (0, 20))
POSITIONS = ([*range(5), *range(8), 0, *range(18)], [*range(20), *range(12)])


def positions_of(**given: object) -> PositionEmbedding:
    return PositionEmbedding(model_config(max_position_embeddings=SEQ + 5, **given), ALONE).double()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_positions_restart_with_documents(cut: tuple[int, ...]) -> None:
    embedding, hidden = positions_of(), hidden_state(32, SEQ)
    found = in_token_slices(embedding, hidden, cut, documents=Documents(STARTS))
    assert torch.equal(found, hidden + torch.stack([embedding.weight[row] for row in POSITIONS]))
    continued = in_token_slices(embedding, hidden, cut, documents=Documents(STARTS, positions_restart=False))
    assert torch.equal(continued, hidden + embedding.weight[:SEQ])


def test_words_and_logits_have_factors_and_a_cap() -> None:
    parts = {"embedding_multiplier": 5.5, "logit_multiplier": 0.25, "logit_softcap": 1.5}
    model = model_config(**parts)
    embedding, output = WordEmbedding(model, ALONE).double(), OutputLayer(model, ALONE).double()
    tokens = torch.tensor([[3, 256, 3], [0, 1, 2]])
    torch.testing.assert_close(embedding(tokens), 5.5 * embedding.weight[tokens], rtol=1e-15, atol=0)
    hidden = 20 * hidden_state(32, SEQ)
    biased = OutputLayer(replace(model, add_output_bias=True, untie_embeddings_and_output_weights=True), ALONE).double()
    biased.linear.bias.data = hidden_state(384, 1)[0, 0]
    for weight, bias, logits in [
        (embedding.weight, None, tied_logits(embedding, hidden)),
        (output.linear.weight, None, output(hidden)),
        (biased.linear.weight, biased.linear.bias, biased(hidden)),
    ]:
        expected = plain.logits(weight, model, hidden, bias)
        assert expected.abs().max() > 0.9 * 1.5
        torch.testing.assert_close(logits.compute()[..., :257], expected, rtol=1e-13, atol=1e-14)
        targets = torch.arange(2 * SEQ).view(2, SEQ)
        losses = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="none")
        torch.testing.assert_close(logits.cross_entropy(targets).flatten(), losses, rtol=1e-12, atol=1e-12)


VOCAB = 120
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=VOCAB,
    vocab_rows=256,
    untie_embeddings_and_output_weights=True,
    add_output_bias=True,
    logit_softcap=3.0,
    init_method_std=0.5,
)


def built(vocabulary_parts: int) -> list[nn.Module]:
    """The layers of the output, seeded as DeepSpeed seeds layers: by their numbers."""
    specs = gpt_layers(MODEL, vocabulary_parts=vocabulary_parts)[output_layer(MODEL.num_layers) :]
    layers = []
    for number, spec in enumerate(specs):
        torch.manual_seed(1234 + output_layer(MODEL.num_layers) + number)
        layers.append(spec.build().double())
    # A bias starts at zero: here it has the same numbers, whatever the parts.
    drawn = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for layer, part in zip(layers, drawn.chunk(vocabulary_parts), strict=True):
        layer.linear.bias.data = part.clone()
    return layers


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_start_as_rows_of_the_whole_weight(parts: int) -> None:
    whole = built(1)[0].linear.weight
    assert torch.equal(torch.cat([part.linear.weight for part in built(parts)]), whole)


@pytest.mark.parametrize("parts", [2, 4])
def test_loss_and_gradients_are_those_of_the_whole_layer(parts: int) -> None:
    """The second of four parts has 64 to 127, whose last rows are padding, and the last two have padding only."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, VOCAB, (2, 8), generator=generator)
    mask = torch.rand(2, 8, generator=generator).round()

    whole, expected_hidden = built(1)[0], hidden.clone().requires_grad_()
    products = F.linear(expected_hidden, whole.linear.weight[:VOCAB], whole.linear.bias[:VOCAB])
    losses = F.cross_entropy((3 * (products / 3).tanh()).flatten(0, 1), targets.flatten(), reduction="none")
    expected = (losses * mask.flatten()).sum() / mask.sum()
    expected.backward()

    layers, found_hidden = built(parts), hidden.clone().requires_grad_()
    sums = layers[0](found_hidden, targets)
    for layer in layers[1:]:
        sums = layer(tuple(sums))
    found = gpt_loss(VocabularySums(*sums), (targets, mask))
    found.backward()

    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(found_hidden.grad, expected_hidden.grad, rtol=1e-12, atol=1e-14)
    for name in ("weight", "bias"):
        of_parts = torch.cat([getattr(layer.linear, name).grad for layer in layers])
        of_whole = getattr(whole.linear, name).grad
        torch.testing.assert_close(of_parts[:VOCAB], of_whole[:VOCAB], rtol=1e-12, atol=1e-14)
        assert of_parts[VOCAB:].abs().max() == 0


def test_the_parts_are_stages_after_the_final_norm() -> None:
    blocks = StagePartition((0, 1, 3))
    assert pipeline_partition(blocks).bounds == (0, 3, 7)
    assert pipeline_partition(blocks, 2).bounds == (0, 3, 6, 7, 8)
