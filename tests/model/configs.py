"""Small models of every shape that the model section can describe."""

import json
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.logits import LiveLogits, Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

SEQ = 32


def model_config(**given: Any) -> ModelConfig:
    defaults = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": SEQ, "vocab_size": 257}
    return ModelConfig(**(defaults | given))


def expert_config(**given: Any) -> ModelConfig:
    """A model of two layers with eight experts."""
    defaults = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 12, "num_experts": 8, "init_method_std": 0.3}
    return model_config(**(defaults | given))


LLAMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 48,
}


def llama_config(**given: Any) -> ModelConfig:
    return model_config(**(LLAMA | given))


def uneven_layers(*entries: dict[str, dict[str, object]]) -> str:
    return json.dumps({"block_configs": entries})


UNEVEN = uneven_layers(
    {"attention": {"num_query_groups": 1}, "mlp": {"ffn_hidden_size": 24}},
    {"attention": {"no_op": True}},
    {"mlp": {"no_op": True}},
)

OF_FAMILIES: dict[str, dict[str, Any]] = {
    "neox_like": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "parallel_residual": True,
        "activation": "gelu",
        "untie_embeddings_and_output_weights": True,
        "output_layer_init_std": 0.3,
    },
    "gptj_like": {
        "position_embedding_type": "rope",
        "rotary_percent": 0.75,
        "rotary_interleaved": True,
        "parallel_residual": True,
        "shared_block_norm": True,
        "disable_bias_linear": True,
        "add_mlp_bias": True,
        "apply_layernorm_1p": True,
    },
    "qwen2_like": {
        **LLAMA,
        "add_qkv_bias": True,
        "rotary_scaling": "yarn",
        "rotary_scaling_factor": 4.0,
        "rotary_original_length": 8,
        "rotary_beta_fast": 1.5,
        "rotary_beta_slow": 0.3,
    },
    "qwen3_like": {
        **LLAMA,
        "qk_norm": "head",
        "attention_output_gate": True,
        "kv_channels": 12,
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": 4.0,
        "rotary_original_length": 8,
        "no_rope_freq": "2",
    },
    "gemma_like": {
        **LLAMA,
        "activation": "geglu",
        "norm_placement": "both",
        "apply_layernorm_1p": True,
        "qk_norm": "head",
        "softmax_scale": 0.2,
        "embedding_multiplier": 32**0.5,
        "logit_softcap": 2.0,
        "attention_softcap": 1.5,
        "sliding_window": 7,
        "window_attn_skip_freq": "2",
        "rotary_base_local": 100.0,
        "untie_embeddings_and_output_weights": False,
    },
    "olmo2_like": {**LLAMA, "num_key_value_heads": 4, "norm_placement": "post", "qk_norm": "all-heads"},
    "deepseek_like": {
        **LLAMA,
        **{"multi_latent_attention": True, "num_key_value_heads": None, "qk_norm": "head", "latent_norm_epsilon": 1e-3},
        **{"q_lora_rank": 10, "kv_lora_rank": 6, "qk_head_dim": 5, "qk_pos_emb_head_dim": 4, "v_head_dim": 7},
        **{"rotary_interleaved": True, "rotary_scaling_factor": 4.0, "rotary_original_length": 8},
        **{"mscale": 0.7, "mscale_all_dim": 1.0},
    },
    "minicpm3_like": {
        **LLAMA,
        **{"multi_latent_attention": True, "num_key_value_heads": None, "kv_lora_rank": 6, "qk_head_dim": 6},
        **{"qk_pos_emb_head_dim": 2, "v_head_dim": 8, "sliding_window": 9, "attention_softcap": 1.5},
        **{"disable_bias_linear": False, "no_rope_freq": "2"},
    },
    "gpt_oss_like": {
        **LLAMA,
        **{
            "disable_bias_linear": False,
            "softmax_type": "learnable",
            "sliding_window": 7,
            "window_attn_skip_freq": "2",
        },
        **{"activation": "quick-geglu", "activation_func_clamp_value": 0.7, "glu_linear_offset": 1.0},
        **{"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "rotary_original_length": 8},
        **{"rotary_beta_fast": 1.5, "rotary_beta_slow": 0.3, "rotary_unrounded_ramp": True},
    },
    "granite_like": {
        **LLAMA,
        "activation": "geglu-exact",
        "add_attention_bias": True,
        "softmax_scale": 0.5,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logit_multiplier": 0.25,
        "rotary_scaling_factor": 2.0,
        "sliding_window": 11,
    },
}
"""Settings of well-known families."""

HYBRID: dict[str, Any] = {
    "hybrid_layer_pattern": "MG*-",
    "num_layers": 4,
    "normalization": "rmsnorm",
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "mamba_state_dim": 5,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "attention_output_gate": True,
}
"""One layer of each part."""

MODELS = {
    "plain": model_config(),
    "grouped": model_config(num_key_value_heads=2),
    "multi_query_untied": model_config(num_key_value_heads=1, untie_embeddings_and_output_weights=True),
    "narrow_mlp": model_config(ffn_hidden_size=40),
    "wide_heads": model_config(kv_channels=24, num_key_value_heads=2),
    "unpadded": model_config(make_vocab_size_divisible_by=1, max_position_embeddings=48),
    "llama": llama_config(),
    "some_channels_rotated": model_config(
        position_embedding_type="rope", rotary_percent=0.5, kv_channels=12, qk_norm="head-rotated"
    ),
    "biased_output": model_config(
        **{"untie_embeddings_and_output_weights": True, "add_output_bias": True, "normalization": "layernorm-no-bias"},
        **{"parallel_residual": True, "shared_block_norm": True},
    ),
    "no_norm_weights": llama_config(normalization="layernorm-no-weights"),
    "no_positions": model_config(position_embedding_type="none", activation="squared-relu"),
    "gate_with_biases": llama_config(disable_bias_linear=False, normalization="layernorm"),
    "uneven": llama_config(heterogeneous_layers_config_path=UNEVEN),
    "uneven_parallel": model_config(
        heterogeneous_layers_config_path=UNEVEN, parallel_residual=True, shared_block_norm=True
    ),
    **{name: model_config(**parts) for name, parts in OF_FAMILIES.items()},
}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any small model, its layers alike or not."""
    num_layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    divisors = st.sampled_from([groups for groups in range(1, heads + 1) if heads % groups == 0])
    attention = st.just({"no_op": True}) | divisors.map(lambda groups: {"num_query_groups": groups}) | st.just({})
    mlp = st.just({"no_op": True}) | st.integers(1, 40).map(lambda width: {"ffn_hidden_size": width}) | st.just({})
    layer = st.fixed_dictionaries({"attention": attention, "mlp": mlp})
    layers = st.lists(layer, min_size=num_layers, max_size=num_layers).map(lambda entries: uneven_layers(*entries))
    seq_length = draw(st.integers(1, 40))
    parallel, positions = draw(st.booleans()), draw(st.sampled_from(["learned_absolute", "rope", "none"]))
    normalization = draw(st.sampled_from(["layernorm", "layernorm-no-bias", "layernorm-no-weights", "rmsnorm"]))
    untied = draw(st.booleans())
    return ModelConfig(
        num_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(divisors),
        kv_channels=2 * draw(st.integers(1, 8)),
        hidden_size=draw(st.integers(1, 40)),
        ffn_hidden_size=draw(st.none() | st.integers(1, 60)),
        seq_length=seq_length,
        max_position_embeddings=draw(st.none() | st.integers(seq_length, 60)),
        position_embedding_type=positions,
        mtp_num_layers=0 if positions == "learned_absolute" else draw(st.integers(0, min(2, seq_length - 1))),
        normalization=normalization,
        qk_norm=draw(st.sampled_from(["none", "head", "head-rotated", *["all-heads"] * (normalization == "rmsnorm")])),
        norm_placement="pre" if parallel else draw(st.sampled_from(["pre", "post", "both"])),
        parallel_residual=parallel,
        shared_block_norm=parallel and draw(st.booleans()),
        activation=draw(st.sampled_from(["gelu", "relu", "swiglu", "geglu"])),
        disable_bias_linear=draw(st.booleans()),
        add_qkv_bias=draw(st.booleans()),
        add_attention_bias=draw(st.booleans()),
        add_mlp_bias=draw(st.booleans()),
        vocab_size=draw(st.integers(1, 300)),
        make_vocab_size_divisible_by=draw(st.sampled_from([1, 8, 128])),
        untie_embeddings_and_output_weights=untied,
        add_output_bias=untied and draw(st.booleans()),
        heterogeneous_layers_config_path=draw(st.none() | layers),
    )


def logits_of(values: Tensor) -> Logits:
    """The output of a last layer with these logits."""
    return Logits(
        values, torch.eye(values.shape[-1], dtype=values.dtype), TensorParallelRanks(), LiveLogits(values.numel())
    )
