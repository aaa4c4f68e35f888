"""The GPT as pipeline layers: their order, sizes and loss; its stages, and the mean of a loss, are in the ladder."""

from math import sqrt

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from hypothesis import example, given, settings

from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import OutputLayer, PositionEmbedding, WordEmbedding
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, layers_with_weights
from megatron_terapipe.model.norm import LayerNorm, RMSNorm
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.price.workload import gpt_workload
from tests.model.configs import HYBRID, llama_config, logits_of, model_config, models

ALONE = TensorParallelRanks()
START = [WordEmbedding, PositionEmbedding]


def test_layers_first_to_last() -> None:
    untied = gpt_layers(llama_config())
    assert [spec.typename for spec in untied] == [*START, *[TransformerBlock] * 3, RMSNorm, OutputLayer]
    assert not any(isinstance(spec, TiedLayerSpec) for spec in untied)
    specs = gpt_layers(model_config())
    assert [spec.typename for spec in specs] == [*START, *[TransformerBlock] * 3, LayerNorm, WordEmbedding]
    first, last = specs[0], specs[-1]
    assert isinstance(first, TiedLayerSpec)
    assert isinstance(last, TiedLayerSpec)
    assert first.key == last.key
    embedding = first.build()
    hidden = torch.randn(2, 5, 32)
    logits = last.forward_fn(embedding, hidden).compute()
    torch.testing.assert_close(logits[..., :257], hidden @ embedding.weight[:257].T)


@given(model=models())
@example(model=model_config(**HYBRID))
@settings(max_examples=60)
def test_parameters_are_as_many_as_the_formulas_say(model: ModelConfig) -> None:
    specs = gpt_layers(model)
    with torch.device("meta"):
        counts = [sum(parameter.numel() for parameter in spec.build().parameters()) for spec in specs]
    # The last layer of a tied model is the first once more.
    assert sum(counts[layer] for layer in layers_with_weights(model)) == flops.model_parameters(model)
    assert gpt_workload(model).parameters == flops.model_parameters(model)
    norm = LAYERS_BEFORE_BLOCKS + model.num_layers
    assert counts[2:norm] == [flops.block_parameters(model, block) for block in model.blocks]
    assert counts[norm] == flops.norm_parameters(model)
    assert counts[0] + counts[1] == flops.embedding_parameters(model)


@pytest.mark.parametrize(
    "parts",
    [{}, {"activation": "swiglu", "normalization": "rmsnorm", "qk_norm": "all-heads"}, {"qk_norm": "head"}],
    ids=["gpt", "llama", "qk_norm"],
)
@pytest.mark.parametrize("given", [{}, {"output_layer_init_std": 0.3, "embedding_init_method_std": 0.7}], ids=str)
@pytest.mark.parametrize("one_plus", [False, True])
def test_initial_weights(parts: dict[str, str], given: dict[str, float], one_plus: bool) -> None:
    """Matrices are drawn; into the residual stream more narrowly by sqrt(2 L). Biases are 0, norms 1."""
    sizes = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "init_method_std": 0.05}
    model = model_config(**sizes, **parts, **given, apply_layernorm_1p=one_plus)
    inner, ends = given.get("output_layer_init_std", 0.05 / 4), given.get("embedding_init_method_std", 0.05)
    torch.manual_seed(0)
    block = TransformerBlock(model, model.blocks[0], ALONE)
    for weight, std in [
        (block.attention.query_key_value.weight, 0.05),
        (block.attention.projection.weight, inner),
        (block.mlp.up.weight, 0.05),
        (block.mlp.down.weight, inner),
        (WordEmbedding(model, ALONE).weight, ends),
        (PositionEmbedding(model, ALONE).weight, ends),
        (OutputLayer(model, ALONE).linear.weight, 0.05),
    ]:
        # The error of a standard deviation from n numbers is 1 / sqrt(2 n); five of those.
        assert weight.std().item() == pytest.approx(std, rel=5 / sqrt(2 * weight.numel()))
        assert abs(weight.mean().item()) < 5 * std / sqrt(weight.numel())
    for name, parameter in block.named_parameters():
        if "norm" in name or "bias" in name:
            first = 1 if "norm.weight" in name and not one_plus else 0
            assert torch.all(parameter == first), name


def test_layers_that_turn_alike_share_a_table() -> None:
    parts = {"rotary_base_local": 100.0, "sliding_window": 8, "window_attn_skip_freq": "2"}
    model = llama_config(num_layers=6, no_rope_freq="[0,0,0,0,1,1]", **parts)
    tables = [spec.build().attention.rotary for spec in gpt_layers(model)[2:-2]]
    assert tables[0] is tables[2] is not None
    assert tables[1] is tables[3] is not None
    assert tables[0] is not tables[1]
    assert tables[4:] == [None, None]


def test_half_precision_logits_are_summed_up_in_fp32() -> None:
    generator = torch.Generator().manual_seed(3)
    halves = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    labels = torch.randint(0, 11, (2, 6), generator=generator)
    mask = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.float32)
    loss = gpt_loss(logits_of(halves), (labels, mask))
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(gpt_loss(logits_of(halves.double()), (labels, mask)).item(), rel=1e-6)
