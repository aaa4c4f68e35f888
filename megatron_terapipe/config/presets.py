"""Published models by name, the values of `--model-preset`.

A preset has the settings of the model, and the length of the sequences that it was published with, but no setting of
the training, such as dropout. Sources:

    TeraPipe   Li et al., arXiv 2102.07988 table 1; only its blocks are timed there, here they get GPT-3's ends
    GPT-2      Radford et al., Language Models are Unsupervised Multitask Learners, table 2; sizes as released
    GPT-3      Brown et al., arXiv 2005.14165 table 2.1
    Llama      Touvron et al., arXiv 2302.13971 table 2
    Llama 2    Touvron et al., arXiv 2307.09288 table 1 and appendix A.2
    Llama 3    Grattafiori et al., arXiv 2407.21783 table 3; sizes below 8 B as released with Llama 3.2
    GPT-NeoX   Black et al., arXiv 2204.06745
    Pythia     Biderman et al., arXiv 2304.01373 table 1
    Mistral    Jiang et al., arXiv 2310.06825 table 1
    Mixtral    Jiang et al., arXiv 2401.04088 table 1; 8x22B as released
    Qwen2.5    Qwen team, arXiv 2412.15115 table 1
    Qwen3      Qwen team, arXiv 2505.09388 tables 1 and 2
    Gemma 2    Gemma team, arXiv 2408.00118 table 1
    OLMo 2     OLMo team, arXiv 2501.00656 table 1
    OLMoE      Muennighoff et al., arXiv 2409.02060
    Granite    Granite team, Granite 3.0 language models (2024); 3.1 as released
    gpt-oss    OpenAI, arXiv 2508.10925 section 2 and table 1
    DeepSeek   DeepSeek-AI, arXiv 2412.19437 section 4.2; its sequences were extended from 4,096 tokens by YaRN
    Kimi K2    Kimi team, arXiv 2507.20534 table 2
    SmolLM3    Hugging Face, SmolLM3: smol, multilingual, long-context reasoner (2025)

Values that a paper leaves out, such as epsilons and rows of the vocabulary, come from `config.json` of the released
weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import sqrt
from typing import Any

from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published model."""

    source: str
    """Publication, by its name in the docstring of this module."""

    published_parameters: float

    settings: Mapping[str, Any]
    """Value of each field of the model section that it does not leave to its default."""


LLAMA: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
}
"""Settings of Llama and of most models after it, which GPT-2 does not have."""

UNTIED: Mapping[str, Any] = {"untie_embeddings_and_output_weights": True}
"""An output layer with weights of its own."""

QWEN25_LARGE: Mapping[str, Any] = {**UNTIED, "vocab_size": 152064, "layernorm_epsilon": 1e-05}
QWEN3_EXPERTS: Mapping[str, Any] = {**UNTIED, "num_experts": 128, "moe_router_topk": 8}
GEMMA2_27B: Mapping[str, Any] = {"kv_channels": 128, "softmax_scale": 1 / 12, "embedding_multiplier": sqrt(4608)}

_NEOX = {"seq_length": 2048, "position_embedding_type": "rope", "rotary_percent": 0.25, "parallel_residual": True}

_DEEPSEEK: Mapping[str, Any] = {
    **{**LLAMA, **UNTIED, "multi_latent_attention": True, "qk_norm": "head", "latent_norm_epsilon": 1e-6},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
    **{"rotary_interleaved": True, "rotary_scaling": "yarn", "rotary_original_length": 4096, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "layernorm_epsilon": 1e-6, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048},
    **{"moe_shared_expert_intermediate_size": 2048, "moe_router_score_function": "sigmoid"},
    "moe_router_enable_expert_bias": True,
}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "GPT-2": {"seq_length": 1024, "vocab_size": 50257, "activation": "gelu"},
    "GPT-3": {"seq_length": 2048, "vocab_size": 50257, "activation": "gelu"},
    "GPT-NeoX": {**_NEOX, **UNTIED, "activation": "gelu"},
    # Rows of the embedding are those of the released weights, which were padded for several ranks.
    "Pythia": {**_NEOX, **UNTIED, "activation": "gelu-exact"},
    "Llama": {**LLAMA, **UNTIED, "vocab_size": 32000, "seq_length": 2048, "layernorm_epsilon": 1e-6},
    "Llama 2": {**LLAMA, **UNTIED, "vocab_size": 32000, "seq_length": 4096},
    "Llama 3": {**LLAMA, "vocab_size": 128256, "rotary_base": 500000.0, "seq_length": 8192},
    # The rotations of longer contexts came after pretraining at 8192 tokens.
    "Llama 3.1": {
        **{**LLAMA, "vocab_size": 128256, "rotary_base": 500000.0, **UNTIED},
        **{"seq_length": 131072, "rotary_scaling": "llama3"},
    },
    "Mistral": {**LLAMA, **UNTIED, "sliding_window": 4096, "vocab_size": 32000, "seq_length": 8192},
    "Qwen2.5": {
        **{**LLAMA, "add_qkv_bias": True, "vocab_size": 151936, "seq_length": 32768},
        **{"rotary_base": 1e6, "layernorm_epsilon": 1e-6},
    },
    "Qwen3": {
        **{**LLAMA, "kv_channels": 128, "qk_norm": "head", "vocab_size": 151936, "seq_length": 32768},
        **{"rotary_base": 1e6, "layernorm_epsilon": 1e-6},
    },
    "Mixtral": {**LLAMA, **UNTIED, "num_experts": 8, "vocab_size": 32000, "rotary_base": 1e6},
    "OLMoE": {
        **{**LLAMA, **UNTIED, "qk_norm": "all-heads", "vocab_size": 50304, "seq_length": 4096, "num_experts": 64},
        **{"moe_router_topk": 8, "moe_router_pre_softmax": True},
    },
    "Granite": {
        **{**LLAMA, "vocab_size": 49155, "seq_length": 131072, "rotary_base": 1.5e6, "layernorm_epsilon": 1e-6},
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "softmax_scale": 1 / 64},
        **{"logit_multiplier": 1 / 6, "moe_router_topk": 8},
    },
    "gpt-oss": {
        **{
            **LLAMA,
            **UNTIED,
            "activation": "quick-geglu",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        },
        **{"disable_bias_linear": False, "softmax_type": "learnable", "kv_channels": 64, "sliding_window": 128},
        **{"window_attn_skip_freq": "2", "moe_router_topk": 4, "vocab_size": 201088, "seq_length": 131072},
        **{"rotary_base": 150000.0, "rotary_scaling": "yarn", "rotary_scaling_factor": 32.0},
        **{"rotary_original_length": 4096, "rotary_unrounded_ramp": True},
    },
    "DeepSeek": {
        **{**_DEEPSEEK, "vocab_size": 129280, "seq_length": 163840, "rotary_scaling_factor": 40.0},
        **{"num_experts": 256, "moe_layer_freq": "[0]*3+[1]*58", "moe_router_topk_scaling_factor": 2.5},
        **{"moe_router_num_groups": 8, "moe_router_group_topk": 4},
    },
    "Kimi K2": {
        **{**_DEEPSEEK, "vocab_size": 163840, "seq_length": 131072, "rotary_scaling_factor": 32.0},
        **{"rotary_base": 50000.0, "num_experts": 384, "moe_layer_freq": "[0]*1+[1]*60"},
        "moe_router_topk_scaling_factor": 2.827,
    },
    "OLMo 2": {
        **{**LLAMA, **UNTIED, "norm_placement": "post", "qk_norm": "all-heads", "vocab_size": 100352},
        **{"seq_length": 4096, "rotary_base": 500000.0, "layernorm_epsilon": 1e-6},
    },
    "SmolLM3": {
        **{**LLAMA, "no_rope_freq": "4", "vocab_size": 128256, "seq_length": 65536},
        **{"rotary_base": 5e6, "layernorm_epsilon": 1e-6},
    },
    "Gemma 2": {
        **{**LLAMA, "activation": "geglu", "kv_channels": 256, "softmax_scale": 1 / 16, "attention_softcap": 50.0},
        **{"logit_softcap": 30.0, "sliding_window": 4096, "window_attn_skip_freq": "2", "norm_placement": "both"},
        **{"apply_layernorm_1p": True, "vocab_size": 256000, "seq_length": 8192, "layernorm_epsilon": 1e-6},
    },
}
"""Settings that the models of a source share, besides their sizes."""


def _preset(
    family: str,
    published: float,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int | None = None,
    groups: int | None = None,
    *,
    source: str = "",
    **own: Any,
) -> Preset:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    if ffn is not None:
        sizes |= {"ffn_hidden_size": ffn, "num_key_value_heads": groups or heads}
    settings = {**sizes, **FAMILIES[family], **own}
    return Preset(source=source or family, published_parameters=published, settings=settings)


MODEL_PRESETS: Mapping[str, Preset] = {
    "gpt2": _preset("GPT-2", 124e6, 12, 768, 12),
    "gpt2-medium": _preset("GPT-2", 355e6, 24, 1024, 16),
    "gpt2-large": _preset("GPT-2", 774e6, 36, 1280, 20),
    "gpt2-xl": _preset("GPT-2", 1.558e9, 48, 1600, 25),
    "gpt3-125m": _preset("GPT-3", 125e6, 12, 768, 12),
    "gpt3-350m": _preset("GPT-3", 350e6, 24, 1024, 16),
    "gpt3-760m": _preset("GPT-3", 760e6, 24, 1536, 16),
    # The table prints 24 heads of 128, which are 3072 channels of a width of 2048; 16 give the 1.3 B it prints.
    "gpt3-1.3b": _preset("GPT-3", 1.3e9, 24, 2048, 16),
    "gpt3-2.7b": _preset("GPT-3", 2.7e9, 32, 2560, 32),
    "gpt3-6.7b": _preset("GPT-3", 6.7e9, 32, 4096, 32),
    # The table prints a width of 5140, which 40 heads do not divide.
    "gpt3-13b": _preset("GPT-3", 13e9, 40, 5120, 40, source="GPT-3, TeraPipe"),
    "gpt3-175b": _preset("GPT-3", 175e9, 96, 12288, 96, source="GPT-3, TeraPipe"),
    "gpt3-1b": _preset("GPT-3", 1.3e9, 24, 2048, 16, source="TeraPipe"),
    "gpt3-44b": _preset("GPT-3", 44e9, 96, 6144, 48, source="TeraPipe"),
    "gpt-neox-20b": _preset("GPT-NeoX", 20.6e9, 44, 6144, 64, vocab_size=50432),
    "pythia-70m": _preset("Pythia", 70.4e6, 6, 512, 8, vocab_size=50304),
    "pythia-160m": _preset("Pythia", 162.3e6, 12, 768, 12, vocab_size=50304),
    "pythia-410m": _preset("Pythia", 405.3e6, 24, 1024, 16, vocab_size=50304),
    "pythia-1b": _preset("Pythia", 1.012e9, 16, 2048, 8, vocab_size=50304),
    "pythia-1.4b": _preset("Pythia", 1.415e9, 24, 2048, 16, vocab_size=50304),
    "pythia-2.8b": _preset("Pythia", 2.775e9, 32, 2560, 32, vocab_size=50304),
    "pythia-6.9b": _preset("Pythia", 6.857e9, 32, 4096, 32, vocab_size=50432),
    "pythia-12b": _preset("Pythia", 11.85e9, 36, 5120, 40, vocab_size=50688),
    "llama-7b": _preset("Llama", 6.7e9, 32, 4096, 32, 11008, 32),
    "llama-13b": _preset("Llama", 13e9, 40, 5120, 40, 13824, 40),
    "llama-30b": _preset("Llama", 32.5e9, 60, 6656, 52, 17920, 52),
    "llama-65b": _preset("Llama", 65.2e9, 80, 8192, 64, 22016, 64),
    "llama2-7b": _preset("Llama 2", 6.74e9, 32, 4096, 32, 11008, 32),
    "llama2-13b": _preset("Llama 2", 13e9, 40, 5120, 40, 13824, 40),
    "llama2-34b": _preset("Llama 2", 33.7e9, 48, 8192, 64, 22016, 8),
    "llama2-70b": _preset("Llama 2", 69e9, 80, 8192, 64, 28672, 8),
    "llama3-1b": _preset("Llama 3", 1.24e9, 16, 2048, 32, 8192, 8),
    "llama3-3b": _preset("Llama 3", 3.21e9, 28, 3072, 24, 8192, 8),
    "llama3-8b": _preset("Llama 3", 8.03e9, 32, 4096, 32, 14336, 8, **UNTIED),
    "llama3-70b": _preset("Llama 3", 70.6e9, 80, 8192, 64, 28672, 8, **UNTIED),
    "llama3-405b": _preset("Llama 3", 405e9, 126, 16384, 128, 53248, 8, **UNTIED),
    "llama3.1-8b": _preset("Llama 3.1", 8.03e9, 32, 4096, 32, 14336, 8),
    "llama3.1-70b": _preset("Llama 3.1", 70.6e9, 80, 8192, 64, 28672, 8),
    "llama3.1-405b": _preset("Llama 3.1", 405e9, 126, 16384, 128, 53248, 8),
    "mistral-7b": _preset("Mistral", 7.24e9, 32, 4096, 32, 14336, 8),
    "mixtral-8x7b": _preset("Mixtral", 46.7e9, 32, 4096, 32, 14336, 8, seq_length=32768),
    "mixtral-8x22b": _preset("Mixtral", 141e9, 56, 6144, 48, 16384, 8, seq_length=65536),
    "qwen2.5-0.5b": _preset("Qwen2.5", 490e6, 24, 896, 14, 4864, 2),
    "qwen2.5-1.5b": _preset("Qwen2.5", 1.54e9, 28, 1536, 12, 8960, 2),
    "qwen2.5-3b": _preset("Qwen2.5", 3.09e9, 36, 2048, 16, 11008, 2),
    "qwen2.5-7b": _preset("Qwen2.5", 7.61e9, 28, 3584, 28, 18944, 4, **UNTIED, vocab_size=152064),
    "qwen2.5-14b": _preset("Qwen2.5", 14.7e9, 48, 5120, 40, 13824, 8, **QWEN25_LARGE),
    "qwen2.5-32b": _preset("Qwen2.5", 32.5e9, 64, 5120, 40, 27648, 8, **QWEN25_LARGE),
    "qwen2.5-72b": _preset("Qwen2.5", 72.7e9, 80, 8192, 64, 29568, 8, **QWEN25_LARGE),
    "qwen3-0.6b": _preset("Qwen3", 600e6, 28, 1024, 16, 3072, 8),
    "qwen3-1.7b": _preset("Qwen3", 1.7e9, 28, 2048, 16, 6144, 8),
    "qwen3-4b": _preset("Qwen3", 4e9, 36, 2560, 32, 9728, 8),
    "qwen3-8b": _preset("Qwen3", 8.2e9, 36, 4096, 32, 12288, 8, **UNTIED),
    "qwen3-14b": _preset("Qwen3", 14.8e9, 40, 5120, 40, 17408, 8, **UNTIED),
    "qwen3-32b": _preset("Qwen3", 32.8e9, 64, 5120, 64, 25600, 8, **UNTIED),
    "qwen3-30b-a3b": _preset("Qwen3", 30.5e9, 48, 2048, 32, 6144, 4, **QWEN3_EXPERTS, moe_ffn_hidden_size=768),
    "qwen3-235b-a22b": _preset("Qwen3", 235e9, 94, 4096, 64, 12288, 4, **QWEN3_EXPERTS, moe_ffn_hidden_size=1536),
    "olmoe-1b-7b": _preset("OLMoE", 6.9e9, 16, 2048, 16, 1024, 16),
    "granite3.1-1b-a400m": _preset("Granite", 1.33e9, 24, 1024, 16, 512, 8, num_experts=32),
    "gpt-oss-20b": _preset("gpt-oss", 20.91e9, 24, 2880, 64, 2880, 8, num_experts=32),
    "gpt-oss-120b": _preset("gpt-oss", 116.83e9, 36, 2880, 64, 2880, 8, num_experts=128),
    "deepseek-v3": _preset("DeepSeek", 671e9, 61, 7168, 128, 18432),
    "kimi-k2": _preset("Kimi K2", 1.04e12, 61, 7168, 64, 18432),
    "olmo2-7b": _preset("OLMo 2", 7.3e9, 32, 4096, 32, 11008, 32),
    "olmo2-13b": _preset("OLMo 2", 13.7e9, 40, 5120, 40, 13824, 40),
    "smollm3-3b": _preset("SmolLM3", 3.08e9, 36, 2048, 16, 11008, 4),
    "gemma2-2b": _preset("Gemma 2", 2.61e9, 26, 2304, 8, 9216, 4, embedding_multiplier=sqrt(2304)),
    "gemma2-9b": _preset("Gemma 2", 9.24e9, 42, 3584, 16, 14336, 8, embedding_multiplier=sqrt(3584)),
    "gemma2-27b": _preset("Gemma 2", 27.2e9, 46, 4608, 32, 36864, 16, **GEMMA2_27B),
}


def find_preset(name: str) -> Preset:
    """Return a preset by its name."""
    if name in MODEL_PRESETS:
        return MODEL_PRESETS[name]
    nearest = get_close_matches(name, MODEL_PRESETS, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"choose among {', '.join(MODEL_PRESETS)}"
    raise ConfigError(f"--model-preset {name} is not known: {remedy}")
