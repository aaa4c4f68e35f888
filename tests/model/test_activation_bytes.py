"""The formula of activation bytes compared with the tensors that autograd keeps."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.measuring.closed_forms import block_activation_bytes_per_token
from benchmarks.measuring.counters import LiveBytes
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import latent_attention
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.layers import BlockShape, LatentSizes
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.expert_dispatch import Pairs
from megatron_terapipe.model.gpt import PredictionLayer, Predictions
from megatron_terapipe.model.logits import LiveLogits, Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.activations import LayerMemory
from megatron_terapipe.search.price.workload import PREDICTION, gpt_workload
from tests.model.configs import OF_FAMILIES, SEQ, llama_config, model_config

ROWS = 4
OF_128 = {"hidden_size": 128, "kv_channels": 32}
SHAPES = {
    "plain": model_config(hidden_size=128),
    "grouped": model_config(hidden_size=128, num_key_value_heads=1),
    "narrow_mlp": model_config(hidden_size=128, ffn_hidden_size=64),
    "wide_heads": model_config(hidden_size=128, kv_channels=96, num_key_value_heads=2),
    "gate": model_config(hidden_size=128, activation="swiglu"),
    "relu": model_config(hidden_size=128, activation="relu"),
    "squared_relu": model_config(hidden_size=128, activation="squared-relu"),
    "rmsnorm": model_config(hidden_size=128, normalization="rmsnorm"),
    "llama": llama_config(hidden_size=128, ffn_hidden_size=192),
    "some_channels_rotated": llama_config(hidden_size=128, ffn_hidden_size=192, rotary_percent=0.25),
    "dropout": llama_config(hidden_size=128, ffn_hidden_size=192, hidden_dropout=0.1, attention_dropout=0.1),
    "norms_in_parallel": model_config(hidden_size=128, parallel_residual=True),
    "one_norm_for_both": model_config(hidden_size=128, parallel_residual=True, shared_block_norm=True),
    "experts": llama_config(hidden_size=128, num_experts=4, moe_ffn_hidden_size=96),
    "experts_of_relu": model_config(hidden_size=128, num_experts=4, activation="relu", disable_bias_linear=True),
    "shared_experts": llama_config(
        **{"hidden_size": 128, "num_experts": 4, "moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 64},
        moe_shared_expert_gate=True,
    ),
    **{name: model_config(**parts | OF_128) for name, parts in OF_FAMILIES.items()},
}
PARTS = [
    BlockShape(num_key_value_heads=0, ffn_hidden_size=64),
    BlockShape(num_key_value_heads=2, ffn_hidden_size=0),
]
RECOMPUTE = ["none", "selective"]
DTYPES = [torch.float32, torch.bfloat16]


def kept_bytes(
    model: ModelConfig,
    block: BlockShape,
    dtype: torch.dtype,
    cut: tuple[int, ...],
    recompute: str,
    kind: type[TransformerBlock] | type[PredictionLayer] = TransformerBlock,
    **more: bool,
) -> int:
    """Bytes of the storages that the backward of a block will read, keys and values included, parameters not."""
    layer = kind(model, block, TensorParallelRanks(), recompute_cheap=recompute == "selective", **more)
    layer.to(dtype)
    state = SequenceState(TokenSlices(cut), sequences=range(ROWS))
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def sorted_pairs(*arguments: Any, **keywords: bool) -> Pairs:
        """Pairs, which functions of autograd keep as they are."""
        pairs = sort(*arguments, **keywords)
        keep(pairs.order_R), keep(pairs.place_TK), keep(pairs.ends_E)
        return pairs

    hidden, sort = torch.randn(ROWS, SEQ, model.hidden_size, dtype=dtype, requires_grad=True), Pairs.of
    outputs: list[torch.Tensor] = []
    others: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, patch.object(Pairs, "of", sorted_pairs):
        for index, (start, end) in enumerate(state.token_slices.bounds()):
            # Each token slice arrives in a tensor of its own, as from the stage before.
            received = hidden[:, start:end].detach().clone().requires_grad_()
            if kind is TransformerBlock:
                outputs.append(layer(received, state.past(0, index)))
                continue
            logits = Logits(received, layer.projection, TensorParallelRanks(), LiveLogits(0))
            given = Predictions((logits,), (received.detach().clone().requires_grad_(),))
            # Output layers keep their inputs, of this depth and of the one before, which is not of this layer.
            outputs.append(keep(layer(given, state.past(0, index)).logits[-1].hidden))
            others.append(received.untyped_storage().data_ptr())
    if block.num_key_value_heads:
        for tensor in kept_keys_and_values(state, block.window):
            keep(tensor)
    for chosen, _ in state.cached_for_recompute.values():
        keep(chosen)
    for key in (*others, *(parameter.untyped_storage().data_ptr() for parameter in layer.parameters())):
        storages.pop(key, None)
    return sum(storage.nbytes() for storage in storages.values())


def kept_keys_and_values(state: SequenceState, window: int | None) -> list[torch.Tensor]:
    """Of the whole sequence; in a window those of each token slice apart. Autograd keeps those of one in one piece."""
    held = state.keys_and_values(0, window)
    if held is None:
        return []
    if window is None:
        return list(held.read(0, SEQ))
    return [each for pair in held.kept.values() for each in pair]


def left_out_bytes(
    model: ModelConfig, block: BlockShape, element_bytes: int, cut: tuple[int, ...], recompute: str
) -> int:
    """Bytes that the formula omits, which do not grow with the hidden size, or not with the tokens."""
    layernorm, tokens = model.normalization == "layernorm", ROWS * SEQ
    # A mean and a deviation in LayerNorm; in RMSNorm a root, in fp32. A norm that is recomputed keeps neither.
    numbers = 2 * element_bytes if layernorm else 4
    parts = bool(block.num_key_value_heads) + bool(block.ffn_hidden_size)
    norms_behind = parts if model.norm_placement != "pre" else 0
    # Of those that several products read, too.
    queries_beside = block.latent is not None and not block.latent.query_rank
    kept_whole = norms_behind or bool(block.num_experts) + queries_beside
    norms = kept_whole if recompute == "selective" else flops.block_norms(model, block)
    left_out = tokens * norms * numbers
    if layernorm and model.apply_layernorm_1p:
        left_out += len(cut) * norms * model.hidden_size * element_bytes  # 1 + weight
    if block.num_key_value_heads and model.qk_norm != "none":
        vectors = model.num_attention_heads + block.num_key_value_heads if model.qk_norm == "head" else 2
        if block.latent is not None:
            vectors = 2 if block.latent.query_rank else 1
        left_out += tokens * numbers * vectors
    if block.num_experts:
        left_out += tokens * element_bytes * model.moe_shared_expert_gate
        left_out += len(cut) * block.num_experts * 4  # ends of the rows of each expert
    # A cosine and a sine, in fp32, for every pair of channels: once for all rows and heads.
    rotates = model.rotates and block.rotated and block.num_key_value_heads
    return left_out + (SEQ * model.rotary_channels // 2 * 2 * 4 if rotates else 0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("cut", [(SEQ,), (20, 12)], ids=["whole", "token_slices"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_formula_equals_the_tensors_of_autograd(
    model: ModelConfig, dtype: torch.dtype, cut: tuple[int, ...], recompute: str
) -> None:
    block = model.blocks[0]
    formula = ROWS * SEQ * block_activation_bytes_per_token(model, block, dtype.itemsize, recompute)
    left_out = left_out_bytes(model, block, dtype.itemsize, cut, recompute)
    assert kept_bytes(model, block, dtype, cut, recompute) == formula + left_out
    assert left_out < 0.05 * formula


@pytest.mark.parametrize("cut", [(SEQ,), (20, 12)], ids=["whole", "token_slices"])
@pytest.mark.parametrize("name", ["deepseek_like", "minicpm3_like"])
def test_formula_where_latents_are_kept(name: str, cut: tuple[int, ...]) -> None:
    model, latents = SHAPES[name], {"latents_kept": True}
    block = model.blocks[0]
    formula = ROWS * SEQ * block_activation_bytes_per_token(model, block, 2, **latents)
    left_out = left_out_bytes(model, block, 2, cut, "none")
    assert kept_bytes(model, block, torch.bfloat16, cut, "none", **latents) == formula + left_out


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", ["llama", "norms_in_parallel", "shared_experts", "deepseek_like"])
def test_formula_of_layers_that_predict_further_tokens(name: str, recompute: str) -> None:
    model = replace(SHAPES[name], mtp_num_layers=1, position_embedding_type="rope", vocab_size=8)
    (layer,) = (each for each in gpt_workload(model).layers if each.name == PREDICTION)
    of_token = LayerMemory(
        **{"layer": layer, "software": TERAPIPE, "element_bytes": 4, "tensor_parallel_size": 1},
        sequence_parallel=False,
    ).of_token(recompute)
    block, norms = model.blocks[-1], 3 * ROWS * SEQ * (8 if model.normalization == "layernorm" else 4)
    left_out = norms + left_out_bytes(model, block, 4, (20, 12), recompute)
    kept = kept_bytes(model, block, torch.float32, (20, 12), recompute, PredictionLayer)
    assert kept == ROWS * SEQ * (of_token.activations + of_token.key_values) + left_out


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_formula_of_keys_and_values_from_latents(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of the last token slice holds as much more for each token before it."""
    sizes = LatentSizes(query_rank=0, rank=8, key_size=32, rotated_size=16, value_size=32)
    numbers, held = flops.expanded_channels(sizes)
    weight = torch.randn(4, sizes.key_size + sizes.value_size, sizes.rank, dtype=torch.bfloat16, requires_grad=True)
    peaks = []
    for num_token_slices in (4, 8):
        state = SequenceState(TokenSlices.uniform(16 * num_token_slices, num_token_slices), sequences=range(ROWS))
        monkeypatch.setattr(latent_attention, "EXPANDED_AT_ONCE", heads * numbers * ROWS * 16 * num_token_slices)
        for index in range(num_token_slices):
            query = torch.randn(ROWS, 16, 4, sizes.head_size, dtype=torch.bfloat16, requires_grad=True)
            latent = torch.randn(ROWS, 16, sizes.kept_size, dtype=torch.bfloat16, requires_grad=True)
            output = state.past(0, index).attend_latent(query, latent, weight, keep_latents=True, scale=0.1)
        with LiveBytes() as live:
            output.backward(torch.ones_like(output))
        peaks.append(live.peak)
    of_token = 2 * heads * held + 4 * sizes.kept_size  # And the sum over heads of the gradients of latents, in fp32.
    assert peaks[1] - peaks[0] == ROWS * 64 * of_token


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("block", PARTS, ids=["no_attention", "no_mlp"])
@pytest.mark.parametrize("name", ["plain", "llama", "one_norm_for_both", "gemma_like", "olmo2_like"])
def test_formula_of_blocks_with_a_part_left_out(name: str, block: BlockShape, recompute: str) -> None:
    model = SHAPES[name]
    formula = ROWS * SEQ * block_activation_bytes_per_token(model, block, 4, recompute)
    left_out = left_out_bytes(model, block, 4, (20, 12), recompute)
    assert kept_bytes(model, block, torch.float32, (20, 12), recompute) == formula + left_out
