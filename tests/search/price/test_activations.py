from dataclasses import replace
from math import inf

import pytest

from benchmarks.measuring.closed_forms import block_activation_bytes_per_token, key_value_bytes_per_token
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.config.flops import LOGITS_AT_ONCE
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import FSDP, MEGATRON_CORE, MEGATRON_LM, TERAPIPE
from megatron_terapipe.search.price.activations import LayerMemory, TokenMemory, limits_of
from megatron_terapipe.search.price.workload import Layer, gpt_workload
from megatron_terapipe.strategy import USUAL_KEYS, KeptKeys
from tests.search.price.machines import gpt

HIDDEN, HEADS, TOKENS = 6144, 64, 2048


def block(**parts: object) -> tuple[ModelConfig, Layer]:
    model = gpt(2, HIDDEN, HEADS, TOKENS, 51200, **parts)
    return model, gpt_workload(model).layers[1]


def memory(
    layer: Layer,
    software: Software = MEGATRON_LM,
    size: int = 1,
    recompute: str = "none",
    sequence: bool = False,
    kept_keys: KeptKeys = USUAL_KEYS,
    operand_bytes: float | None = None,
) -> TokenMemory:
    return LayerMemory(
        operand_bytes=operand_bytes,
        layer=layer,
        software=software,
        element_bytes=2,
        tensor_parallel_size=size,
        sequence_parallel=sequence,
        kept_keys=kept_keys,
    ).of_token(recompute)


@pytest.mark.parametrize("size", [1, 8])
def test_korthikanti(size: int) -> None:
    """Equations 1 to 5 and section 5 of arXiv 2205.05198, in bytes of one token."""
    _, layer = block()
    scores = 5 * HEADS * TOKENS / HIDDEN
    plain = memory(layer, size=size)
    assert plain.activations == pytest.approx(HIDDEN * (10 + 24 / size + scores / size))
    sequence = memory(layer, size=size, sequence=True)
    assert sequence.activations == pytest.approx(HIDDEN * (34 + scores) / size)
    selective = memory(layer, size=size, sequence=True, recompute="selective")
    assert selective.activations == pytest.approx(HIDDEN * 34 / size)
    assert memory(layer, size=size, recompute="full").activations == 2 * HIDDEN


def test_operands_in_8_bits() -> None:
    """Outputs of both norms and of the activation have 1 byte in place of 2; that of attention is there in both."""
    model, layer = block(activation="swiglu", normalization="rmsnorm", num_key_value_heads=8)
    in_half, in_eight = (memory(layer, MEGATRON_CORE, operand_bytes=each).activations for each in (None, 1.0))
    assert in_half - in_eight == 2 * HIDDEN + model.ffn_hidden_size - HIDDEN
    both = [memory(layer, MEGATRON_CORE, recompute="full", operand_bytes=each).activations for each in (None, 1.0)]
    assert both == [2 * HIDDEN] * 2


def test_selective_recompute_of_operators() -> None:
    """Kept are both inputs of norms, queries, values, the output of attention with its log-sums, and one width."""
    model, layer = block(activation="swiglu", normalization="rmsnorm", num_key_value_heads=8)
    kept = memory(layer, replace(FSDP, selective_recomputes="operators"), recompute="selective").activations
    values = 8 * HIDDEN // HEADS
    assert kept == 2 * (2 * HIDDEN + 2 * HIDDEN + values + model.ffn_hidden_size) + 4 * HEADS


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"activation": "swiglu", "normalization": "rmsnorm", "num_key_value_heads": 8, "disable_bias_linear": True},
        {"qk_norm": "head", "norm_placement": "both", "activation": "geglu"},
        {"norm_placement": "post", "num_key_value_heads": 8},
        {"parallel_residual": True},
        {"parallel_residual": True, "shared_block_norm": True, "qk_norm": "head"},
        {"attention_softcap": 30.0, "attention_output_gate": True},
    ],
)
def test_ours_is_the_trainers_own_formula(recompute: str, parts: dict[str, object]) -> None:
    model, layer = block(**parts)
    expected = block_activation_bytes_per_token(model, model.blocks[0], 2, recompute)
    found = memory(layer, TERAPIPE, recompute=recompute)
    assert found.activations + found.key_values == expected
    assert found.key_values == key_value_bytes_per_token(model, model.blocks[0], 2)
    assert found.key_value_gradients == 2 * found.key_values  # fp32
    rounded = memory(layer, TERAPIPE, recompute=recompute, kept_keys=KeptKeys("bf16"))
    assert rounded == found._replace(key_value_gradients=found.key_values)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_keys_in_windows_go_with_their_token_slice(recompute: str) -> None:
    window = 100
    (model, layer), (_, whole) = block(sliding_window=window), block()
    expected = block_activation_bytes_per_token(model, model.blocks[0], 2, recompute)
    found, without = memory(layer, TERAPIPE, recompute=recompute), memory(whole, TERAPIPE, recompute=recompute)
    assert (found.activations, found.key_values, found.key_value_gradients) == (expected, 0, 0)
    # An input gradient frees them, weight gradients do not need them.
    assert found.activations - found.freed_by_input_gradient == without.activations - without.freed_by_input_gradient
    # In fp32, of the tokens that a token slice reaches back to.
    assert found.window_gradients == (window - 1) * 2 * without.key_values
    rounded = memory(layer, TERAPIPE, recompute=recompute, kept_keys=KeptKeys("bf16"))
    assert rounded == found._replace(window_gradients=found.window_gradients / 2)
    assert without.window_gradients == 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "stage"])
def test_states_are_kept_in_every_recomputation_and_shared_by_heads(recompute: str) -> None:
    model, layer = block(hybrid_layer_pattern="MM")
    expected = flops.state_bytes(model.blocks[0].recurrence, 2)
    assert [memory(layer, TERAPIPE, size, recompute).state for size in (1, 4)] == [expected, expected / 4]
    assert memory(block()[1], TERAPIPE, recompute=recompute).state == 0


def test_scores_that_are_written_out_are_held_while_the_backward_runs() -> None:
    (_, layer), (_, windowed), (_, flash) = (
        block(attention_softcap=30.0),
        block(attention_softcap=30.0, sliding_window=1000),
        block(),
    )
    assert memory(layer, TERAPIPE).scores == 4 * 4 * HEADS * TOKENS
    assert memory(layer, TERAPIPE, size=8).scores == 4 * 4 * HEADS * TOKENS / 8
    # A tile of 500 queries reaches 999 tokens back.
    assert memory(windowed, TERAPIPE).scores == 4 * 4 * HEADS * (999 + 500)
    assert memory(flash, TERAPIPE).scores == 0


def test_keys_and_values_from_latents_are_held_while_the_backward_runs() -> None:
    sizes = {"kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    _, layer = block(multi_latent_attention=True, **sizes)
    # A product of 256, and four tensors of 192, of each head and token; at once as many as 320 in 2^27 numbers.
    found = memory(layer, TERAPIPE, size=8, kept_keys=KeptKeys(latents=True))
    assert (found.expanded, found.expanded_head) == (2 * 1024 * TOKENS * HEADS / 8, 2 * 1024 * TOKENS)
    assert limits_of(TERAPIPE, 2, [layer]).expanded == pytest.approx(2 * 1024 * 2**27 / 320)
    assert memory(layer, TERAPIPE).expanded == 0


def test_tensors_that_wait_for_weight_gradients() -> None:
    """Inputs of the four products and gradients of their outputs: h + h + h + 4h and 3h + h + 4h + h numbers."""
    _, layer = block()
    for recompute in ("none", "full"):
        found = memory(layer, TERAPIPE, recompute=recompute)
        assert found.activations - found.freed_by_input_gradient == 2 * 16 * HIDDEN
    shared = memory(layer, TERAPIPE, size=8)
    assert shared.activations - shared.freed_by_input_gradient == 2 * HIDDEN * (4 + 12 / 8)


def test_ends() -> None:
    model, _ = block()
    layers = gpt_workload(model).layers
    head = memory(layers[-1], size=8)
    assert head.logits == 4 * model.padded_vocab_size() / 8  # 4sbv, section 4.3
    ours = memory(layers[-1], TERAPIPE, size=8)
    assert ours.logits == 2 * model.padded_vocab_size() / 8  # as they are, in bf16, up to a limit
    assert limits_of(TERAPIPE, 2, []).kept == 2 * LOGITS_AT_ONCE
    assert limits_of(MEGATRON_LM, 2, []).kept == inf
    assert ours.freed_by_input_gradient == ours.activations
    assert memory(layers[0]).activations == HIDDEN  # masks of dropout
    assert memory(layers[0], TERAPIPE).activations == 0
