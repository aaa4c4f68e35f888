"""Vocabulary stages: the parts of an output layer, one after the other, are the output layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import output_layer
from megatron_terapipe.model.embedding import VocabularySums
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition

VOCAB = 250
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=64,
    untie_embeddings_and_output_weights=True,
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
    return layers


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_start_as_rows_of_the_whole_weight(parts: int) -> None:
    whole = built(1)[0].linear.weight
    assert torch.equal(torch.cat([part.linear.weight for part in built(parts)]), whole)


@pytest.mark.parametrize("parts", [2, 4])
def test_loss_and_gradients_are_those_of_the_whole_layer(parts: int) -> None:
    """The last of four parts has 192 to 255: its last rows are padding, which no token can be."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 8, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, VOCAB, (2, 8), generator=generator)
    mask = torch.rand(2, 8, generator=generator).round()

    whole, expected_hidden = built(1)[0], hidden.clone().requires_grad_()
    products = F.linear(expected_hidden, whole.linear.weight[:VOCAB])
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
    of_parts = torch.cat([layer.linear.weight.grad for layer in layers])
    torch.testing.assert_close(of_parts[:VOCAB], whole.linear.weight.grad[:VOCAB], rtol=1e-12, atol=1e-14)
    assert of_parts[VOCAB:].abs().max() == 0


def test_a_part_without_words_adds_nothing() -> None:
    model = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        seq_length=4,
        vocab_size=5,
        vocab_rows=16,
        untie_embeddings_and_output_weights=True,
    )
    first, second = (spec.build() for spec in gpt_layers(model, vocabulary_parts=2)[output_layer(1) :])
    hidden, targets = torch.randn(1, 4, 8, requires_grad=True), torch.tensor([[0, 4, 2, 1]])
    before = first(hidden, targets)
    after = second(tuple(before))
    torch.testing.assert_close(after.cross_entropy(targets), before.cross_entropy(targets))
    after.cross_entropy(targets).sum().backward()
    assert second.linear.weight.grad.abs().max() == 0
    assert first.linear.weight.grad.isfinite().all()


def test_the_parts_are_stages_behind_the_final_norm() -> None:
    blocks = StagePartition((0, 1, 3))
    assert pipeline_partition(blocks).bounds == (0, 3, 7)
    assert pipeline_partition(blocks, 2).bounds == (0, 3, 6, 7, 8)
