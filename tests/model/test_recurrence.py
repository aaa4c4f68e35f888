"""Mamba-2 and the gated delta net: in token slices, by documents, beside a loop over tokens and beside transformers."""

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
from transformers.models.mamba2 import configuration_mamba2, modeling_mamba2
from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.recurrences import linear_attention
from deepspeed_ext.runtime.state.carried_states import CarriedStates
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.flops import state_bytes
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS, Recurrence
from megatron_terapipe.huggingface.families.family import TensorNames
from megatron_terapipe.huggingface.weight_rules import layer_rules, split_layer
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.experts import ExpertLayer
from megatron_terapipe.model.recurrence import RecurrentMixer
from megatron_terapipe.model.recurrence_kernels import DELTA_RULE
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import SEQ, llama_config, model_config
from tests.model.plain import hidden_state, in_token_slices, random_weights, recurrence

SIZES = {"num_heads": 4, "num_groups": 2, "key_size": 6, "value_size": 8, "conv_size": 4}
KINDS = {kind: Recurrence(kind=kind, **SIZES) for kind in ("mamba2", "gated-delta-net")}
MODEL = model_config()
LENGTH = 150


def mixer(kind: str, model: ModelConfig = MODEL) -> RecurrentMixer:
    return random_weights(RecurrentMixer(model, KINDS[kind], TensorParallelRanks()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [None, ((0, 2, 70), (0, 64, 65, 66, 149))], ids=["whole", "documents"])
def test_token_slices_and_documents_equal_a_loop_over_tokens(
    kind: str, starts: tuple[tuple[int, ...], ...] | None
) -> None:
    layer = mixer(kind)
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


def by_part(weight: Tensor, *widths: int) -> list[Tensor]:
    """Rows of groups, as rows of each part."""
    parts = weight.unflatten(0, (SIZES["num_groups"], -1)).split(list(widths), dim=1)
    return [part.flatten(0, 1) for part in parts]


def of_mamba2(layer: RecurrentMixer) -> torch.nn.Module:
    config = configuration_mamba2.Mamba2Config(
        hidden_size=MODEL.hidden_size,
        num_heads=4,
        head_dim=8,
        state_size=6,
        n_groups=2,
        expand=1,
        conv_kernel=4,
        chunk_size=16,
        layer_norm_epsilon=MODEL.layernorm_epsilon,
    )
    reference = modeling_mamba2.Mamba2Mixer(config, 0).double().eval()
    z, x, b, c, dt = by_part(layer.in_projection.weight, 16, 16, 6, 6, 2)
    taps, biases = (by_part(each, 16, 6, 6) for each in (layer.convolution.weight, layer.convolution.bias))
    state = {
        "in_proj.weight": torch.cat((z, x, b, c, dt)),
        "conv1d.weight": torch.cat(taps).unsqueeze(1),
        "conv1d.bias": torch.cat(biases),
        "D": layer.skip,
    }
    return with_state(reference, layer, state)


def of_qwen3_next(layer: RecurrentMixer) -> torch.nn.Module:
    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=MODEL.hidden_size,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
        rms_norm_eps=MODEL.layernorm_epsilon,
    )
    reference = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0).double().eval()
    rows = layer.in_projection.weight.unflatten(0, (2, -1))
    state = {
        "in_proj_qkvz.weight": rows[:, :44].flatten(0, 1),
        "in_proj_ba.weight": rows[:, 44:].flatten(0, 1),
        "conv1d.weight": torch.cat(by_part(layer.convolution.weight, 6, 6, 16)).unsqueeze(1),
    }
    return with_state(reference, layer, state)


def with_state(reference: torch.nn.Module, layer: RecurrentMixer, state: dict[str, Tensor]) -> torch.nn.Module:
    more = {
        "A_log": layer.decay,
        "dt_bias": layer.time_bias,
        "norm.weight": layer.norm.weight,
        "out_proj.weight": layer.projection.weight,
    }
    reference.load_state_dict(state | more)
    return reference


@pytest.mark.parametrize(("kind", "reference"), [("mamba2", of_mamba2), ("gated-delta-net", of_qwen3_next)])
def test_layers_equal_those_of_transformers(kind: str, reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, into which transformers would cast nothing: its fp32 is fp64 here."""
    layer = mixer(kind, replace(MODEL, normalization="rmsnorm"))
    other, hidden = reference(layer), hidden_state(MODEL.hidden_size, LENGTH)
    found = in_token_slices(layer, hidden, (LENGTH,))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    expected = other(hidden)
    assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_gates_of_attention_and_of_shared_experts_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 20}
    model = replace(
        llama_config(qk_norm="head", attention_output_gate=True, kv_channels=12, num_experts=4, moe_ffn_hidden_size=20),
        **{"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True, "apply_layernorm_1p": True},
    )
    config = configuration_qwen3_next.Qwen3NextConfig(
        **sizes,
        **{"hidden_size": model.hidden_size, "head_dim": 12, "num_experts_per_tok": 2, "norm_topk_prob": True},
        **{"shared_expert_intermediate_size": 24, "rms_norm_eps": model.layernorm_epsilon},
        **{"attn_implementation": "sdpa", "experts_implementation": "eager"},
    )
    block, ranks = model.blocks[0], TensorParallelRanks()
    layer = torch.nn.ModuleDict(
        {"attention": SelfAttention(model, block, ranks), "mlp": ExpertLayer(model, block, ranks)}
    )
    random_weights(layer)
    names = TensorNames(prefix="", shared_up=tuple(f"mlp.shared_expert.{each}_proj" for each in ("gate", "up")))
    names = replace(names, shared_down="mlp.shared_expert.down_proj", expert_up=("mlp.experts.gate_up_proj",))
    names = replace(names, expert_down="mlp.experts.down_proj")
    weights = dict(layer.named_parameters())
    rules = layer_rules(model, names, LAYERS_BEFORE_BLOCKS, weights)
    theirs = {name.removeprefix("layers.0."): weight for name, weight in split_layer(rules, weights).items()}
    theirs = {name.removesuffix(".weight") if ".experts." in name else name: theirs[name] for name in theirs}
    other = torch.nn.ModuleDict(
        {
            "self_attn": modeling_qwen3_next.Qwen3NextAttention(config, 3),
            "mlp": modeling_qwen3_next.Qwen3NextSparseMoeBlock(config),
        }
    ).double()
    other.load_state_dict(theirs)
    hidden = hidden_state(model.hidden_size, SEQ)
    found = [in_token_slices(layer[name], hidden, (13, 1, 18)) for name in ("attention", "mlp")]
    for rule in rules:
        assert torch.equal(rule.join(rule.split(weights[rule.ours])), weights[rule.ours])
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    channels, places = torch.arange(0, 12, 2, dtype=torch.float64), torch.arange(SEQ, dtype=torch.float64)
    angles = torch.outer(places, 10_000.0 ** -(channels / 12)).repeat(1, 2)
    attended, _ = other["self_attn"](hidden, (angles.cos()[None], angles.sin()[None]), None)
    for ours, expected in zip(found, (attended, other["mlp"](hidden)), strict=True):
        assert (ours - expected).norm() <= 1e-12 * expected.norm()


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
