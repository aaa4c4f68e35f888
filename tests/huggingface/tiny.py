"""Small random models of every family, built by transformers from its own classes."""

from typing import Any

import torch
import transformers

VOCAB, POSITIONS = 101, 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    # Large weights, so that every one of them counts in the logits.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LEARNED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
_SCALED_QUERIES = _YARN | {
    **{"original_max_position_embeddings": 5, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.4},
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "rope_theta": 100.0,
}
_FALCON = {"ffn_hidden_size": 48}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
    "attention_bias": True,
}
_ROUTED_BY_SOFTMAX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
_QWEN3_MOE = _ROUTED_BY_SOFTMAX | {"head_dim": 12}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 10},
}
_ROUTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2},
    "routed_scaling_factor": 2.5,
}
_SPARSE = _QWEN3_MOE | {"num_shared_experts": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2}
_GRANITE_HYBRID = (
    {name: value for name, value in _GRANITE.items() if name != "attention_bias"}
    | _MAMBA
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "shared_intermediate_size": 20}
)
_TYPES = ["full_attention", "sliding_attention", "sliding_attention"]
_DELTA_NET = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16},
    # The norms of short keys and outputs amplify rounding.
    **{"initializer_range": 0.1, "rms_norm_eps": 1e-3},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
_SHARED_EXPERT = _DELTA_NET | _QWEN3_MOE | {"shared_expert_intermediate_size": 20, "head_dim": 16}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-untied-relu-unscaled": (
        "gpt2",
        {"activation_function": "relu", "tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": 40},
    ),
    "llama": ("llama", {}),
    "llama-tied-biased-wide-heads": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "llama-attention-bias": ("llama", {"attention_bias": True, "hidden_act": "gelu"}),
    "llama-3.1": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-yarn-deepseek": (
        "llama",
        {"rope_parameters": _YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.2, "mscale_all_dim": 0.7}},
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-whole": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": _TYPES}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 2}),
    "gemma3-scaled": (
        "gemma3_text",
        {
            "head_dim": 12,
            "sliding_window": 6,
            "layer_types": _TYPES,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 9, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": POSITIONS // 4, "rope_parameters": _LONGROPE},
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e2}}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 0, 1], "attention_bias": True}),
    "granite": ("granite", _GRANITE),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 8}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {}),
    "falcon-7b": ("falcon", _FALCON),
    "falcon-40b": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-serial": ("falcon", _FALCON | {"parallel_attn": False, "multi_query": False, "bias": True}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "opt-unbiased": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "enable_bias": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "qwen3_moe": ("qwen3_moe", _QWEN3_MOE | {"mlp_only_layers": [1]}),
    "qwen3_moe-renormalised": ("qwen3_moe", _QWEN3_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 3}),
    "qwen3_moe-dense": ("qwen3_moe", _QWEN3_MOE | {"mlp_only_layers": [0, 1, 2]}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3}),
    "granitemoe": ("granitemoe", _GRANITE | {"num_local_experts": 4}),
    "granitemoeshared": ("granitemoeshared", _GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 24}),
    "glm4_moe": (
        "glm4_moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
            **{"routed_scaling_factor": 2.5, "moe_intermediate_size": 24, "n_shared_experts": 2},
            **{"head_dim": 12, "use_qk_norm": True, "attention_bias": True},
        },
    ),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "ministral": ("ministral", {"sliding_window": 6, "layer_types": _TYPES, "head_dim": 12}),
    "arcee": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "seed_oss": ("seed_oss", {"head_dim": 12}),
    "ernie4_5": ("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "glm": ("glm", {"head_dim": 12, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.34}}),
    "glm4": ("glm4", {"head_dim": 12, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"sliding_window": 6, "layer_types": _TYPES}),
    "olmo3-scaled": (
        "olmo3",
        {
            **{"sliding_window": 6, "layer_types": _TYPES},
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_theta": 50.0}},
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "exaone4-whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "helium": ("helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {
            "head_dim": 12,
            "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 100.0},
        },
    ),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "phi": ("phi", {}),
    "cohere": ("cohere", {"attention_bias": True, "logit_scale": 0.7}),
    "cohere2": ("cohere2", {"sliding_window": 6, "sliding_window_pattern": 2, "logit_scale": 0.7}),
    "olmo": ("olmo", {}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 6}),
    "nemotron_h": (
        "nemotron_h",
        {
            **{"layers_block_type": ["linear_attention", "full_attention", "mlp"], "head_dim": 12},
            **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "time_step_min": 1e-12},
        },
    ),
    "qwen3_next": ("qwen3_next", _DELTA_NET | {"num_experts": 0, "linear_conv_kernel_dim": 3}),
    "qwen3_next-experts": ("qwen3_next", _SHARED_EXPERT | {"mlp_only_layers": [1]}),
    "qwen3_next-attention-bias": (
        "qwen3_next",
        _DELTA_NET
        | {"layer_types": None, "full_attention_interval": 2, "mlp_only_layers": [0, 1, 2], "attention_bias": True},
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe_text", _SHARED_EXPERT),
    "ministral3": ("ministral3", {"head_dim": 12, "rope_parameters": _SCALED_QUERIES}),
    "deepseek_v3": (
        "deepseek_v3",
        _LATENT
        | _ROUTED
        | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        _LATENT | _ROUTED | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "rope_interleave": False},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        _LATENT
        | _ROUTED
        | {"q_lora_rank": None, "first_k_dense_replace": 1}
        | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT | _ROUTED | {"rms_norm_eps": 1e-3}),
    "sarvam_mla": ("sarvam_mla", _LATENT | _ROUTED | {"q_lora_rank": None}),
    "youtu": ("youtu", _LATENT),
    "minicpm3": ("minicpm3", _LATENT | {"rms_norm_eps": 1e-3, "scale_emb": 6.0, "dim_model_base": 20}),
    "gpt_oss": (
        "gpt_oss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 7},
            # A clamp that many numbers meet, and rotations of which some are between the ends of the ramp.
            **{"swiglu_limit": 0.8, "rope_parameters": _YARN | {"beta_fast": 1.5, "beta_slow": 0.3, "truncate": False}},
        },
    ),
    "qwen2_moe": ("qwen2_moe", _ROUTED_BY_SOFTMAX | {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 3}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 12}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _ERNIE | {"moe_layer_interval": 2},
    ),
    "ernie4_5_moe-all-but-first": ("ernie4_5_moe", _ERNIE | {"moe_layer_start_index": 1}),
    "ernie4_5_moe-third": ("ernie4_5_moe", _ERNIE | {"moe_layer_interval": 3}),
    "mellum": ("mellum", _QWEN3_MOE | {"sliding_window": 6, "layer_types": _TYPES}),
    "dots1": (
        "dots1",
        _ROUTED | {"first_k_dense_replace": 1, "norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "solar_open": ("solar_open", _ROUTED | {"head_dim": 12, "attention_bias": True}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "rotary_dim": 6}),
    "exaone_moe": ("exaone_moe", _SPARSE | {"sliding_window": 6, "sliding_window_pattern": 2}),
    "hy_v3": ("hy_v3", _SPARSE | {"attention_bias": True}),
    "afmoe": ("afmoe", _SPARSE | {"sliding_window": 6, "global_attn_every_n_layers": 2, "mup_enabled": True}),
    "granitemoehybrid": ("granitemoehybrid", _GRANITE_HYBRID | {"num_local_experts": 4}),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        _GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    "gpt_bigcode-many-key-heads": ("gpt_bigcode", {"multi_query": False}),
}
"""The `model_type` of each, and its settings other than the common ones."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The settings of a model, with others in their place."""
    kind, settings = TINY[name]
    common = _LEARNED if kind in ("gpt2", "gpt_bigcode", "gptj") else _COMMON
    return transformers.CONFIG_MAPPING[kind](**common | settings | changes, attn_implementation="eager")


def tiny_model(name: str, **changes: Any) -> Any:
    """A model of transformers, in fp32 and without dropout, of which no bias and no norm is as it starts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter.dim() == 1 and "inv_freq" not in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            if name.endswith("linear_attn.A_log"):
                # States that last for some tokens: the gradients of a decay that leaves nothing are only rounding.
                parameter -= 3
    return model
