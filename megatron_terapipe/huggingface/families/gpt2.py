"""Families with learned positions and LayerNorm: GPT-2, GPT-BigCode (SantaCoder, StarCoder), OPT."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.huggingface.families.family import Family
from megatron_terapipe.huggingface.families.setting import (
    UNGATED,
    Always,
    Biases,
    Fields,
    Fixed,
    Reading,
    Same,
    Setting,
    SizeKeys,
    Word,
    Written,
    sizes,
)
from megatron_terapipe.huggingface.families.settings_file import NUMBER, SWITCH
from megatron_terapipe.huggingface.families.tensor_names import TensorNames

_LEARNED = Always(position_embedding_type="learned_absolute", normalization="layernorm")


class _ScaledScores:
    """Scores of attention over the root of a head's width, unless the file says that they are not scaled."""

    keys: Sequence[str] = ("scale_attn_weights",)

    def read(self, reading: Reading) -> Fields:
        """Return the scale, where it is not the usual one."""
        return {} if reading.file.value("scale_attn_weights", SWITCH, True) else {"softmax_scale": 1.0}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        return {"scale_attn_weights": model.softmax_scale != 1 or model.kv_channels == 1}


def _gpt2_settings(activation: str) -> tuple[Setting, ...]:
    return (
        *sizes(
            SizeKeys(
                hidden_size="n_embd", num_layers="n_layer", heads="n_head", positions="n_positions", ffn="n_inner"
            ),
            tied=True,
            vocab_size=50257,
            n_embd=768,
            n_inner=None,
            n_layer=12,
            n_head=12,
            n_positions=1024,
            initializer_range=0.02,
        ),
        _LEARNED,
        Same("layer_norm_epsilon", "layernorm_epsilon", NUMBER, 1e-5),
        Biases(True, True, True),
        Word("activation_function", "activation", UNGATED, activation),
        _ScaledScores(),
        Written({"resid_pdrop": "hidden_dropout", "embd_pdrop": "hidden_dropout", "attn_pdrop": "attention_dropout"}),
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
"""Names of the tensors of GPT-2 and of GPT-BigCode, whose matrices lie differently."""

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        *_gpt2_settings("gelu_new"),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        # Another order of computing the same; and heads for other tasks.
        Written(
            dict.fromkeys(
                (
                    *("reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
                    *("summary_proj_to_labels", "summary_first_dropout"),
                )
            )
        ),
    ),
    tensors=replace(_TENSORS, transposed=True),
)


class _OneKeyHead:
    """One key head for all query heads, unless the file says that each has its own."""

    keys: Sequence[str] = ("multi_query",)

    def read(self, reading: Reading) -> Fields:
        """Return the key heads."""
        return {"num_key_value_heads": 1} if reading.file.value("multi_query", SWITCH, True) else {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        return {"multi_query": model.num_key_value_heads == 1}


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    settings=(
        *_gpt2_settings("gelu_pytorch_tanh"),
        _OneKeyHead(),
        # Another order of computing the same.
        Written(dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"))),
    ),
    tensors=replace(_TENSORS, grouped=True),
)


class _EqualWidths:
    """Words as wide as the model: OPT 350M alone has narrower ones, and matrices between."""

    keys: Sequence[str] = ("word_embed_proj_dim",)

    def read(self, reading: Reading) -> Fields:
        """Return nothing, or refuse the model."""
        file, fields = reading
        file.expect("word_embed_proj_dim", (fields["hidden_size"], None))
        return {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        return {"word_embed_proj_dim": model.hidden_size}


OPT = Family(
    name="opt",
    architecture="OPTForCausalLM",
    settings=(
        *sizes(
            SizeKeys(ffn="ffn_dim", init="init_std"),
            tied=True,
            vocab_size=50272,
            hidden_size=768,
            ffn_dim=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=2048,
            init_std=0.02,
        ),
        _LEARNED,
        Always(layernorm_epsilon=1e-5),
        Biases("enable_bias", "enable_bias", "enable_bias", default=True),
        Word("activation_function", "activation", UNGATED, "relu"),
        Fixed("do_layer_norm_before", (True,)),
        Fixed("_remove_final_layer_norm", (False,)),
        Fixed("layer_norm_elementwise_affine", (True,)),
        _EqualWidths(),
        Written({"dropout": "hidden_dropout", "attention_dropout": "attention_dropout", "layerdrop": None}),
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
