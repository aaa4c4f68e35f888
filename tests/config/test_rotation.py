"""Rotary positions."""

from dataclasses import replace
from math import pi
from typing import Any

import pytest

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.rotation import FOLLOW_LENGTH, for_length, frequencies_of_base, rotation_of
from tests.model.configs import model_config

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rotary_scaling": "llama3", "rotary_scaling_factor": 8.0, "rotary_original_length": 8192}
YARN = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "rotary_original_length": 4096}
LONGROPE: dict[str, Any] = {
    "rotary_scaling": "longrope",
    "rotary_original_length": 4096,
    "rotary_short_factors": ",".join(str(1 + pair / 64) for pair in range(64)),
    "rotary_long_factors": ",".join(str(1 + pair**2 / 60) for pair in range(64)),
    "max_position_embeddings": 131072,
}
LONG = {"seq_length": 8192}
FEW: dict[str, Any] = {
    "rotary_percent": 0.25,
    **{name: ",".join(LONGROPE[name].split(",")[:16]) for name in ("rotary_short_factors", "rotary_long_factors")},
}
DYNAMIC = {"rotary_scaling": "dynamic", "rotary_scaling_factor": 4.0, "rotary_original_length": 8192}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rotary_scaling_factor": 2.5},
    "llama 3.1": LLAMA3,
    "llama 3.2": LLAMA3 | {"rotary_scaling_factor": 32.0},
    "llama3, other bounds": LLAMA3 | {"rotary_low_frequency_factor": 2.0, "rotary_high_frequency_factor": 9.0},
    "llama3, short": LLAMA3 | {"rotary_original_length": 64},
    "yarn": YARN,
    "yarn, other bounds": YARN | {"rotary_beta_fast": 20.0, "rotary_beta_slow": 2.0},
    "yarn, short": YARN | {"rotary_original_length": 16},
    "yarn, factor given": YARN | {"rotary_attention_factor": 1.25},
    "yarn, some channels": YARN | {"rotary_percent": 0.25},
    "longrope": LONGROPE,
    "longrope, long": LONGROPE | LONG,
    "longrope, at the length before": LONGROPE | LONG | {"seq_length": 4096},
    "longrope, factors given": LONGROPE | LONG | {"rotary_scaling_factor": 2.0, "rotary_attention_factor": 1.5},
    "longrope, some channels": LONGROPE | LONG | FEW,
    "dynamic": DYNAMIC,
    "dynamic, at the length before": DYNAMIC | {"seq_length": 8192, "max_position_embeddings": 32768},
    "dynamic, long": DYNAMIC | {"seq_length": 32768},
    "dynamic, some channels": DYNAMIC | {"seq_length": 131072, "rotary_percent": 0.25},
}


def rope(**given: Any) -> ModelConfig:
    given = {"position_embedding_type": "rope", "kv_channels": 128, "rotary_base": 500000.0} | given
    return model_config(**given)


def theirs(model: ModelConfig) -> tuple[list[float], float]:
    """Frequencies and attention factor of transformers, in fp32."""
    parameters: dict[str, Any] = {
        "rope_type": model.rotary_scaling,
        "rope_theta": model.rotary_base,
        "factor": model.rotary_scaling_factor,
        "partial_rotary_factor": model.rotary_percent,
    }
    if model.rotary_scaling not in ("linear", "dynamic"):
        parameters["original_max_position_embeddings"] = model.rotary_original_length
    if model.rotary_scaling == "llama3":
        parameters["low_freq_factor"] = model.rotary_low_frequency_factor
        parameters["high_freq_factor"] = model.rotary_high_frequency_factor
    if model.rotary_scaling == "yarn":
        parameters["beta_fast"], parameters["beta_slow"] = model.rotary_beta_fast, model.rotary_beta_slow
        parameters["attention_factor"] = model.rotary_attention_factor
    if model.rotary_scaling == "longrope":
        parameters["short_factor"] = [float(each) for each in model.rotary_short_factors.split(",")]
        parameters["long_factor"] = [float(each) for each in model.rotary_long_factors.split(",")]
        if model.rotary_attention_factor == 1.5:
            parameters["attention_factor"] = 1.5
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=model.kv_channels,
        max_position_embeddings=8192 if model.rotary_scaling == "dynamic" else 131072,
        rope_parameters=parameters,
    )
    frequencies, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[model.rotary_scaling](
        config, seq_len=model.seq_length
    )
    return frequencies.tolist(), factor


@pytest.mark.parametrize("name", CASES)
def test_scaled_frequencies_are_those_of_transformers(name: str) -> None:
    model = rope(**CASES[name])
    rotation = rotation_of(model, model.blocks[0])
    frequencies, factor = theirs(model)
    assert rotation.frequencies == pytest.approx(frequencies, rel=3e-6)
    assert rotation.factor == pytest.approx(factor, rel=1e-12)
    plain = rotation_of(rope(rotary_percent=model.rotary_percent), model.blocks[0])
    assert max(now / before for now, before in zip(rotation.frequencies, plain.frequencies, strict=True)) <= 1
    if model.rotary_scaling in FOLLOW_LENGTH:
        return
    assert rotation.frequencies[-1] == pytest.approx(plain.frequencies[-1] / model.rotary_scaling_factor)


@pytest.mark.parametrize(("factor", "length"), [(4.0, 32768), (2.0, 131072)])
def test_dynamic_scaling_is_a_larger_base_at_a_fixed_length(factor: float, length: int) -> None:
    """`--rotary-base` for transformers' dynamic NTK at one length, as in docs/how-to/migrating.md."""
    before, channels, base = 8192, 128, 500_000.0
    stretch = factor * length / before - (factor - 1)
    model = rope(rotary_base=base * stretch ** (channels / (channels - 2)))
    parameters = {"rope_type": "dynamic", "rope_theta": base, "factor": factor}
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=channels,
        max_position_embeddings=before,
        rope_parameters=parameters,
    )
    frequencies, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    assert rotation_of(model, model.blocks[0]).frequencies == pytest.approx(frequencies.tolist(), rel=3e-6)


def test_rotations_follow_the_length_that_a_text_will_have() -> None:
    model = rope(**LONGROPE | LONG)
    assert for_length(model, 4096) == rope(**LONGROPE | {"seq_length": 4096})
    assert for_length(model, 2**20).seq_length == 131072
    plain = rope(**YARN)
    assert for_length(plain, 5) is plain


@pytest.mark.parametrize("name", ["yarn", "yarn, other bounds", "yarn, short"])
def test_yarn_is_that_of_megatron(name: str) -> None:
    yarn = pytest.importorskip("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    model = rope(**CASES[name])
    rotation, pairs = rotation_of(model, model.blocks[0]), model.kv_channels // 2
    assert rotation is not None
    bounds = (model.rotary_beta_fast, model.rotary_beta_slow, model.kv_channels, model.rotary_base)
    first, last = yarn._yarn_find_correction_range(*bounds, model.rotary_original_length)
    scaled = yarn._yarn_linear_ramp_mask(first, last, pairs, "cpu").tolist()
    plain = frequencies_of_base(model.rotary_base, model.kv_channels)
    expected = [
        each * (1 - share + share / model.rotary_scaling_factor) for each, share in zip(plain, scaled, strict=True)
    ]
    assert rotation.frequencies == pytest.approx(expected, rel=1e-6)
    assert rotation.factor == pytest.approx(yarn._yarn_get_concentration_factor(model.rotary_scaling_factor, 1.0, 0.0))


def test_without_scaling_wavelengths_are_powers_of_the_base() -> None:
    rotation = rotation_of(model := rope(kv_channels=8, rotary_base=16.0), model.blocks[0])
    assert rotation.frequencies == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8], rel=1e-15)
    assert 2 * pi / rotation.frequencies[-1] == pytest.approx(2 * pi * 8)


def test_layers_may_turn_otherwise_or_not_at_all() -> None:
    model = rope(
        **LLAMA3,
        num_layers=4,
        sliding_window=8,
        window_attn_skip_freq="[1,0,1,0]",
        rotary_base_local=100.0,
        no_rope_freq="[0,0,0,1]",
        rotary_interleaved=True,
    )
    local, scaled, third, none = (rotation_of(model, block) for block in model.blocks)
    assert local == third != scaled
    assert none is None
    assert local.name != scaled.name
    assert local.frequencies == rotation_of(rope(rotary_base=100.0), model.blocks[1]).frequencies
    assert scaled.frequencies == rotation_of(rope(**LLAMA3), model.blocks[1]).frequencies
    assert local.interleaved and scaled.interleaved
    without = replace(model, rotary_base_local=None)
    assert len({rotation_of(without, block) for block in without.blocks[:3]}) == 1
    assert rotation_of(model_config(), model.blocks[0]) is None
