"""The GPT as pipeline layers: what stands where, how large it is, and its loss."""

from itertools import pairwise
from math import log, sqrt

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import nn
from torch.nn import functional as F

from deepspeed_ext.plan.partition import StagePartition
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.inference.whole_model import WholeModel
from megatron_terapipe.model import flops
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import OutputLayer, PositionEmbedding, WordEmbedding
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition
from tests.model.configs import MODELS, model_config

ENDS = ([WordEmbedding, PositionEmbedding], [nn.LayerNorm])


def test_tied_layers_first_to_last() -> None:
    specs = gpt_layers(model_config())
    assert [spec.typename for spec in specs] == [*ENDS[0], *[TransformerBlock] * 3, *ENDS[1], WordEmbedding]
    first, last = specs[0], specs[-1]
    assert isinstance(first, TiedLayerSpec)
    assert isinstance(last, TiedLayerSpec)
    assert first.key == last.key
    embedding = first.build()
    hidden = torch.randn(2, 5, 32)
    torch.testing.assert_close(last.forward_fn(embedding, hidden), hidden @ embedding.weight.T)


def test_untied_layers_first_to_last() -> None:
    specs = gpt_layers(model_config(untie_embeddings_and_output_weights=True))
    assert [spec.typename for spec in specs] == [*ENDS[0], *[TransformerBlock] * 3, *ENDS[1], OutputLayer]
    assert not any(isinstance(spec, TiedLayerSpec) for spec in specs)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_as_many_as_the_formula_says(model: ModelConfig) -> None:
    whole = WholeModel(model)
    assert sum(parameter.numel() for parameter in whole.parameters()) == flops.model_parameters(model)
    block = TransformerBlock(model)
    assert sum(parameter.numel() for parameter in block.parameters()) == flops.block_parameters(model)


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [((0, 3), (0, 7)), ((0, 2, 4), (0, 4, 8)), ((0, 1, 2, 5), (0, 3, 4, 9))],
)
def test_the_ends_of_the_model_stand_with_its_outermost_blocks(
    blocks: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    partition = pipeline_partition(StagePartition(blocks))
    assert partition.bounds == expected
    kinds = [spec.typename for spec in gpt_layers(model_config(num_layers=blocks[-1]))]
    assert partition.num_layers == len(kinds)
    counts = [
        [kinds[layer] for layer in partition.layers(stage)].count(TransformerBlock) for stage in range(len(blocks) - 1)
    ]
    assert counts == [end - start for start, end in pairwise(blocks)]


def test_initial_weights() -> None:
    """Matrices are drawn; into the residual stream more narrowly by sqrt(2 L). Biases are 0, norms 1."""
    model = model_config(num_layers=8, hidden_size=256, num_attention_heads=8, init_method_std=0.05)
    torch.manual_seed(0)
    block = TransformerBlock(model)
    for weight, std in [
        (block.attention.query_key_value.weight, 0.05),
        (block.attention.projection.weight, 0.05 / 4),
        (block.mlp.up.weight, 0.05),
        (block.mlp.down.weight, 0.05 / 4),
        (WordEmbedding(model).weight, 0.05),
        (PositionEmbedding(model).weight, 0.05),
        (OutputLayer(model).linear.weight, 0.05),
    ]:
        # The error of a standard deviation from n numbers is 1 / sqrt(2 n); five of those.
        assert weight.std().item() == pytest.approx(std, rel=5 / sqrt(2 * weight.numel()))
        assert abs(weight.mean().item()) < 5 * std / sqrt(weight.numel())
    for name, parameter in block.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (1 if "norm.weight" in name else 0)), name


class TestLoss:
    def logits_and_labels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64).requires_grad_()
        labels = torch.randint(0, 11, (2, 6), generator=generator)
        mask = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.float32)
        return logits, labels, mask

    def test_it_is_the_mean_over_loss_bearing_tokens(self) -> None:
        logits, labels, mask = self.logits_and_labels()
        chosen = mask.bool()
        expected = F.cross_entropy(logits[chosen], labels[chosen])
        loss = gpt_loss(logits, (labels, mask))
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.all(gradient[~chosen] == 0)
        assert torch.all(gradient[chosen].abs().sum(-1) > 0)

    def test_equal_logits_cost_the_logarithm_of_the_vocabulary(self) -> None:
        _, labels, mask = self.logits_and_labels()
        assert gpt_loss(torch.zeros(2, 6, 11), (labels, mask)).item() == pytest.approx(log(11))

    def test_a_token_slice_without_loss_bearing_tokens_costs_nothing(self) -> None:
        logits, labels, mask = self.logits_and_labels()
        assert not mask[:, :2].any()
        loss = gpt_loss(logits[:, :2], (labels[:, :2], mask[:, :2]))
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.all(gradient == 0)

    def test_half_precision_logits_are_summed_up_in_fp32(self) -> None:
        logits, labels, mask = self.logits_and_labels()
        halves = logits.to(torch.bfloat16)
        loss = gpt_loss(halves, (labels, mask))
        assert loss.dtype is torch.float32
        assert loss.item() == pytest.approx(gpt_loss(halves.double(), (labels, mask)).item(), rel=1e-6)
