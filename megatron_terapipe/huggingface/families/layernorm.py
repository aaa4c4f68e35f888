"""Families with LayerNorm.

With learned positions: GPT-2, GPT-BigCode (SantaCoder, StarCoder), OPT. With rotary positions: GPT-NeoX and Pythia,
GPT-J, Phi, StarCoder 2, StableLM, Nemotron, Falcon. Without biases: Cohere's; without weights: OLMo.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.family import Family, TensorNames
from megatron_terapipe.huggingface.families.layer_settings import rotations, window_of_all, window_or_unrotated
from megatron_terapipe.huggingface.families.llama import ATTENTION_DROPOUT, llama_like
from megatron_terapipe.huggingface.families.settings import (
    ATTENTION_BIASES,
    COUNT,
    NUMBER,
    SWITCH,
    UNGATED,
    Fields,
    Setting,
    SettingsFile,
    always,
    biases,
    fixed,
    ignored,
    same,
    sizes,
    word,
    written,
)

_LEARNED = always(position_embedding_type="learned_absolute", normalization="layernorm")

_GPT2_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def _gpt2_settings(activation: str) -> tuple[Setting, ...]:
    return (
        *sizes((50257, 1024, 768, None, 12, 12, 0.02), _GPT2_SIZES, tied=True),
        _LEARNED,
        same("layer_norm_epsilon", "layernorm_epsilon", NUMBER, 1e-5),
        biases(True, True, True),
        word("activation_function", "activation", UNGATED, activation),
        # Scores are divided by the root of a head's width, unless the file sets scale_attn_weights to false.
        Setting(
            ("scale_attn_weights",),
            lambda file, fields: {} if file.value("scale_attn_weights", SWITCH, True) else {"softmax_scale": 1.0},
            lambda model: {"scale_attn_weights": model.softmax_scale != 1 or model.kv_channels == 1},
        ),
        written(resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout", attn_pdrop="attention_dropout"),
    )


_TENSORS = TensorNames(
    prefix="transformer.",
    words="wte",
    positions="wpe",
    blocks="h",
    query_key_value=("attn.c_attn",),
    projection="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    final_norm="ln_f",
    not_weights=(".attn.bias", ".attn.masked_bias"),
)
"""Names of the tensors of GPT-2 and of GPT-BigCode, which differ in the order of matrices."""

_GPT2_ALIASES = {key: usual for usual, key in _GPT2_SIZES.items() if usual != "intermediate_size"}

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        *_gpt2_settings("gelu_new"),
        fixed("scale_attn_by_inverse_layer_idx", False),
        # Another order of computing the same; and heads for other tasks.
        ignored(
            *("reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
            *("summary_proj_to_labels", "summary_first_dropout"),
        ),
    ),
    tensors=replace(_TENSORS, transposed=True),
    aliases=_GPT2_ALIASES,
)


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    settings=(
        *_gpt2_settings("gelu_pytorch_tanh"),
        # One key head for all query heads, unless the file sets multi_query to false.
        Setting(
            ("multi_query",),
            lambda file, fields: {"num_key_value_heads": 1} if file.value("multi_query", SWITCH, True) else {},
            lambda model: {"multi_query": model.num_key_value_heads == 1},
        ),
        # Another order of computing the same.
        ignored("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    ),
    tensors=replace(_TENSORS, grouped=True),
    aliases=_GPT2_ALIASES,
)


def _check_equal_widths(file: SettingsFile, fields: Fields) -> Fields:
    """Refuse words narrower than the model: only OPT 350M has them, with matrices between."""
    file.expect("word_embed_proj_dim", (fields["hidden_size"], None))
    return {}


_OPT_SIZES = {"intermediate_size": "ffn_dim", "initializer_range": "init_std"}

OPT = Family(
    name="opt",
    architecture="OPTForCausalLM",
    settings=(
        *sizes((50272, 2048, 768, 3072, 12, 12, 0.02), _OPT_SIZES, tied=True),
        _LEARNED,
        always(layernorm_epsilon=1e-5),
        biases("enable_bias", "enable_bias", "enable_bias", default=True),
        word("activation_function", "activation", UNGATED, "relu"),
        fixed("do_layer_norm_before", True),
        fixed("_remove_final_layer_norm", False),
        fixed("layer_norm_elementwise_affine", True),
        Setting(
            ("word_embed_proj_dim",), _check_equal_widths, lambda model: {"word_embed_proj_dim": model.hidden_size}
        ),
        written(dropout="hidden_dropout", attention_dropout="attention_dropout"),
        ignored("layerdrop"),
    ),
    tensors=TensorNames(
        prefix="model.decoder.",
        positions="embed_positions",
        unread_positions=2,
        projection="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        final_norm="final_layer_norm",
    ),
)


def _layer_norm(key: str = "layer_norm_eps", **more: Any) -> tuple[Setting, ...]:
    """Return the settings of LayerNorm, with the key of its epsilon."""
    return always(**{"normalization": "layernorm"} | more), same(key, "layernorm_epsilon", NUMBER, 1e-5)


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        *sizes((50432, 2048, 6144, 24576, 44, 64, 0.02)),
        rotations(base_key="rotary_emb_base", part=0.25, part_key="rotary_pct"),
        *_layer_norm(),
        biases(qkv="attention_bias", projection="attention_bias", mlp=True, default=True),
        word("hidden_act", "activation", UNGATED, "gelu"),
        same("use_parallel_residual", "parallel_residual", SWITCH, True),
        fixed("is_decoder", False, True),
        written(hidden_dropout="hidden_dropout"),
        ignored("classifier_dropout"),
        ATTENTION_DROPOUT,
    ),
    tensors=TensorNames(
        prefix="gpt_neox.",
        words="embed_in",
        query_key_value=("attention.query_key_value",),
        grouped=True,
        projection="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="final_layer_norm",
        output="embed_out",
        not_weights=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
)

_SIDE_BY_SIDE = always(parallel_residual=True, shared_block_norm=True)

_OUTPUT_BIAS = (
    always(add_output_bias=True),
    fixed(
        "tie_word_embeddings",
        False,
        reason="an output layer with biases has weights of its own in our models",
        end="train it as layers of your own (docs/how-to/own-models.md)",
    ),
)

GPTJ = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    settings=(
        *sizes((50400, 2048, 4096, None, 28, 16, 0.02), _GPT2_SIZES),
        always(position_embedding_type="rope", rotary_interleaved=True, normalization="layernorm"),
        Setting(
            ("rotary_dim",),
            lambda file, fields: {
                "rotary_percent": file.value("rotary_dim", COUNT, 64)
                / (fields["hidden_size"] // fields["num_attention_heads"])
            },
            lambda model: {"rotary_dim": model.rotary_channels},
        ),
        _SIDE_BY_SIDE,
        *_OUTPUT_BIAS,
        same("layer_norm_epsilon", "layernorm_epsilon", NUMBER, 1e-5),
        biases(mlp=True),
        word("activation_function", "activation", UNGATED, "gelu_new"),
        written(resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout", attn_pdrop="attention_dropout"),
    ),
    tensors=replace(
        _TENSORS,
        query_key_value=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        projection="attn.out_proj",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
    ),
    aliases=_GPT2_ALIASES,
)

PHI = llama_like(
    "phi",
    "PhiForCausalLM",
    _SIDE_BY_SIDE,
    *_OUTPUT_BIAS,
    fixed("qk_layernorm", False),
    written(resid_pdrop="hidden_dropout", embd_pdrop="hidden_dropout"),
    activation=word("hidden_act", "activation", UNGATED, "gelu_new"),
    norm=_layer_norm(),
    rotation=rotations(part=0.5),
    bias=biases(qkv=True, projection=True, mlp=True),
    head_size=always(),
    tensors=TensorNames(projection="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", final_norm="final_layernorm"),
    defaults=(51200, 2048, 2048, 8192, 24, 32),
)

_COHERE: dict[str, Any] = {
    "norm": _layer_norm(normalization="layernorm-no-bias"),
    "bias": ATTENTION_BIASES,
    "tied": True,
    "defaults": (256000, 8192, 8192, 22528, 40, 64),
}
_OF_COHERE = (
    always(rotary_interleaved=True),
    _SIDE_BY_SIDE,
    same("logit_scale", "logit_multiplier", NUMBER, 0.0625),
)

COHERE = llama_like(
    "cohere",
    "CohereForCausalLM",
    *_OF_COHERE,
    fixed("use_qk_norm", False, None),
    rotation=rotations(base=500_000.0),
    **_COHERE,
)

COHERE2 = llama_like(
    "cohere2",
    "Cohere2ForCausalLM",
    *_OF_COHERE,
    # Without a window transformers rotates no layer.
    Setting((), lambda file, fields: {"sliding_window": file.value("sliding_window", COUNT, 4096)}),
    window_or_unrotated(),
    # transformers computes heads from the other sizes.
    head_size=ignored("head_dim"),
    **_COHERE,
)

OLMO = llama_like(
    "olmo",
    "OlmoForCausalLM",
    fixed("clip_qkv", None),
    norm=(always(normalization="layernorm-no-weights", layernorm_epsilon=1e-5),),
    bias=ATTENTION_BIASES,
    defaults=(50304, 2048, 4096, 11008, 32, 32),
)

STARCODER2 = llama_like(
    "starcoder2",
    "Starcoder2ForCausalLM",
    window_of_all(),
    written(residual_dropout="hidden_dropout", embedding_dropout="hidden_dropout"),
    activation=word("hidden_act", "activation", UNGATED, "gelu_pytorch_tanh"),
    norm=_layer_norm("norm_epsilon"),
    bias=biases(qkv="use_bias", projection="use_bias", mlp="use_bias", default=True),
    key_heads=2,
    tied=True,
    tensors=TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
    defaults=(49152, 4096, 3072, 12288, 30, 24),
    init_std=0.018042,
)


STABLELM = llama_like(
    "stablelm",
    "StableLmForCausalLM",
    # Attention and MLP side by side have one norm.
    same("use_parallel_residual", "shared_block_norm", SWITCH, False),
    same("use_parallel_residual", "parallel_residual", SWITCH, False),
    fixed("qk_layernorm", False),
    written(hidden_dropout="hidden_dropout"),
    norm=_layer_norm(),
    rotation=rotations(part=0.25),
    bias=biases(qkv="use_qkv_bias"),
    key_heads=32,
    head_size=always(),
    defaults=(50304, 4096, 2560, 6912, 32, 32),
)

NEMOTRON = llama_like(
    "nemotron",
    "NemotronForCausalLM",
    activation=word("hidden_act", "activation", UNGATED, "relu2"),
    norm=_layer_norm("norm_eps", apply_layernorm_1p=True),
    rotation=rotations(part=0.5),
    bias=biases(qkv="attention_bias", projection="attention_bias", mlp="mlp_bias"),
    tensors=TensorNames(up=("mlp.up_proj",)),
    defaults=(256000, 4096, 6144, 24576, 32, 48),
    init_std=0.0134,
)


def _read_falcon_layers(file: SettingsFile, fields: Fields) -> Fields:
    """Return the key heads and norms of Falcon, whose 40 B has an architecture of its own.

    The first has one key head, or as many as query heads, and one norm for attention and MLP side by side. The new one
    has any number of key heads, and two norms unless the file sets one.
    """
    file.expect("alibi", (False, None), False)
    new = file.value("new_decoder_architecture", SWITCH, False)
    parallel = file.value("parallel_attn", SWITCH, True)
    heads = file.value("num_kv_heads", COUNT, None, nullable=True)
    if not new:
        heads = 1 if file.value("multi_query", SWITCH, True) else None
    norms = file.value("num_ln_in_parallel_attn", COUNT, None, nullable=True) or (2 if new else 1)
    if (new and not parallel) or norms > (2 if new else 1):
        raise ConfigError(
            f"{file.where} has parallel_attn {parallel} and num_ln_in_parallel_attn {norms} with "
            f"new_decoder_architecture {new}, for which transformers has no layer: get the file again"
        )
    found = {"parallel_residual": parallel, "shared_block_norm": parallel and norms == 1}
    return found if heads is None else {**found, "num_key_value_heads": heads}


def _write_falcon_layers(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys, in the first architecture where it has the model."""
    key_heads, heads = model.num_key_value_heads, model.num_attention_heads
    several = key_heads not in (1, heads) or (model.parallel_residual and not model.shared_block_norm)
    return {
        "new_decoder_architecture": several,
        "multi_query": key_heads == 1,
        "parallel_attn": model.parallel_residual,
        "num_kv_heads": key_heads,
        "num_ln_in_parallel_attn": (1 if model.shared_block_norm else 2) if several else None,
        "alibi": False,
    }


def _falcon_tensors(model: ModelConfig) -> TensorNames:
    two_side_by_side = model.parallel_residual and not model.shared_block_norm
    return TensorNames(
        prefix="transformer.",
        words="word_embeddings",
        blocks="h",
        query_key_value=("self_attention.query_key_value",),
        grouped=True,
        projection="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        attention_norm="ln_attn" if two_side_by_side else "input_layernorm",
        mlp_norm="ln_mlp" if two_side_by_side else "post_attention_layernorm",
        final_norm="ln_f",
    )


FALCON = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    settings=(
        *sizes((65024, 2048, 4544, None, 32, 71, 0.02), {"intermediate_size": "ffn_hidden_size"}, tied=True),
        rotations(),
        *_layer_norm("layer_norm_epsilon"),
        biases("bias", "bias", "bias"),
        word("activation", "activation", UNGATED, "gelu"),
        Setting(
            (
                *("new_decoder_architecture", "multi_query", "parallel_attn", "num_kv_heads"),
                *("num_ln_in_parallel_attn", "alibi"),
            ),
            _read_falcon_layers,
            _write_falcon_layers,
        ),
        written(hidden_dropout="hidden_dropout"),
        ATTENTION_DROPOUT,
    ),
    tensors=_falcon_tensors,
    aliases={"hidden_size": "n_embed"},
)
