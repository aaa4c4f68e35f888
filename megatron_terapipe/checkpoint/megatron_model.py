"""Facts of a checkpoint of Megatron-LM: arguments, iteration, model, and the names of its tensors. Needs no torch.

Megatron is declared as the families of Hugging Face are, with the arguments of a run in place of a `config.json`: one
declaration reads a model, writes it, and finds the settings that it cannot express.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.foreign import MEGATRON_COMMON_FILE, MEGATRON_RANK_FILE, MEGATRON_RELEASE
from megatron_terapipe.checkpoint.inert_pickles import load_without_tensors
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.latent import yarn_factor
from megatron_terapipe.config.layers import window_of_megatron
from megatron_terapipe.errors import CheckpointError, ConfigError, first_line
from megatron_terapipe.huggingface.families.family import Family, FurtherNames, TensorNames
from megatron_terapipe.huggingface.families.settings import (
    COUNT,
    NATURAL,
    NOT_NEGATIVE,
    NUMBER,
    SWITCH,
    WORD,
    Fields,
    Kind,
    Setting,
    SettingsFile,
    fixed,
    opposite,
    same,
    word,
    written,
)


def common_file(directory: Path) -> Path:
    """Return the file of a checkpoint that has the arguments of its run."""
    found = [directory / MEGATRON_COMMON_FILE, *sorted(directory.glob(f"mp_rank_*/{MEGATRON_RANK_FILE}"))]
    file = next((path for path in found if path.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"checkpoint {directory} of Megatron-LM has neither {MEGATRON_COMMON_FILE} nor mp_rank_*/"
            f"{MEGATRON_RANK_FILE}: save it with --ckpt-format torch_dist, which is read here"
        )
    return file


def iteration_of(directory: Path, common: Mapping[str, Any]) -> int:
    """Return the iteration of a checkpoint; 0 for a model that no run has trained, as in Megatron-LM."""
    return 0 if directory.name == MEGATRON_RELEASE else int(common["iteration"])


def unreadable(directory: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(f"checkpoint {directory} of Megatron-LM cannot be read ({first_line(error)}): save it again")


def megatron_info(directory: Path, model: ModelConfig | None = None, program: str | None = None) -> CheckpointInfo:
    """Return the facts of a checkpoint: as if one rank had saved it.

    Args:
        model: the run's, which has the vocabulary before padding; None for the arguments' or, without one, all rows.
        program: file of the program whose layers, with names of Megatron's, the run has; None for the GPT's.
    """
    file = common_file(directory)
    try:
        common = load_without_tensors(file)
        args, iteration = common["args"], iteration_of(directory, common)
        # As Megatron-LM counts those of its earlier versions.
        samples = iteration and int(getattr(args, "consumed_train_samples", 0) or iteration * args.global_batch_size)
        rows = None if (found := getattr(args, "padded_vocab_size", None)) is None else int(found)
        contents = {name: value for name, value in vars(args).items() if name in MEGATRON.keys}
    except Exception as error:  # On a damaged file an unpickler may raise anything.
        raise unreadable(directory, error) from None
    own_layers = model is not None and program is not None
    theirs = model if own_layers else MEGATRON.read(SettingsFile(contents, f"checkpoint {directory} of Megatron-LM"))
    if model is None:
        theirs = replace(theirs, vocab_size=theirs.vocab_size or rows, vocab_rows=rows)
    else:
        _check_vocabulary(model, args, rows, directory)
        own = ("vocab_size", "vocab_rows", "make_vocab_size_divisible_by", "model_preset")
        theirs = replace(theirs, **{name: getattr(model, name) for name in own})
    return CheckpointInfo(
        iteration=iteration,
        consumed_samples=samples,
        model=asdict(theirs),
        layout=ParallelLayout(),
        optimizer=str(getattr(args, "optimizer", "adam")),
        partitioned=False,
        tokenizer={},
        program=program,
        optimizer_schedule={
            name: value
            for name in ("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "weight_decay")
            if isinstance(value := getattr(args, name, None), float | int | str)
        },
    )


def _check_vocabulary(model: ModelConfig, args: Namespace, rows: int | None, directory: Path) -> None:
    """Refuse a run whose vocabulary Megatron does not pad to the rows of a checkpoint."""
    words = model.vocab_size or 0
    multiple = getattr(args, "make_vocab_size_divisible_by", 128) * getattr(args, "tensor_model_parallel_size", 1)
    if rows is not None and rows not in (-(-words // multiple) * multiple, model.vocab_rows):
        raise CheckpointError(
            f"checkpoint {directory} of Megatron-LM has {rows} rows of words, to which the {words} tokens of this run "
            f"are not padded: give its tokenizer, or --padded-vocab-size {rows}"
        )


_ANY = Kind("a value", lambda value: True)


def _read_key_heads(file: SettingsFile, fields: Fields) -> Fields:
    # The number counts only with the switch.
    if not file.value("group_query_attention", SWITCH, False):
        return {}
    return {"num_key_value_heads": file.value("num_query_groups", COUNT, 1)}


_YARN: Mapping[str, tuple[str, float]] = {
    "rotary_scaling_factor": ("rotary_scaling_factor", 1.0),
    "original_max_position_embeddings": ("rotary_original_length", 4096),
    "beta_fast": ("rotary_beta_fast", 32.0),
    "beta_slow": ("rotary_beta_slow", 1.0),
}
"""Numbers of YaRN by their names there: ours, and Megatron's defaults."""


def _read_yarn(file: SettingsFile, begin: str = "") -> dict[str, Any]:
    numbers = {name: file.value(begin + name, NUMBER, None, nullable=True) for name in _YARN}
    return {ours: numbers[name] or default for name, (ours, default) in _YARN.items()}


def _read_positions(file: SettingsFile, fields: Fields) -> Fields:
    kind = file.value("position_embedding_type", WORD, "learned_absolute")
    if file.value("use_rotary_position_embeddings", SWITCH, False):
        kind = "rope"
    elif kind == "learned_absolute" and not file.value("add_position_embedding", SWITCH, True):
        kind = "none"
    elif kind == "yarn":
        unrounded = file.value("yarn_correction_range_round_to_int", SWITCH, None, nullable=True) is False
        yarn = {"rotary_scaling": "yarn", "rotary_unrounded_ramp": unrounded, **_read_yarn(file, "yarn_")}
        return {"position_embedding_type": "rope", **yarn}
    if kind not in ("learned_absolute", "rope", "none"):
        raise ConfigError(f"{file.where} has positions of type {kind}: this model cannot be trained here")
    return {"position_embedding_type": kind}


_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _read_latents(file: SettingsFile, fields: Fields) -> Fields:
    """Return the sizes of latent attention and its rotations, which replace the rotations of other attention.

    Neighbouring channels turn together. Scores have the square of the factor of `mscale_all_dim`, without YaRN, too.
    """
    if not file.value("multi_latent_attention", SWITCH, False):
        return {}
    if fields["rotary_interleaved"]:
        raise file.refusal("rotary_interleaved", "latent attention has an order of channels of its own")
    sizes = {name: file.value(name, COUNT, None, nullable=name == "q_lora_rank") for name in _OF_LATENTS}
    weights = {name: float(file.value(name, NOT_NEGATIVE)) for name in ("mscale", "mscale_all_dim")}
    yarn, kind = _read_yarn(file), file.expect("rope_type", (None, "yarn", "rope"))
    factor = yarn_factor(yarn["rotary_scaling_factor"], weights["mscale_all_dim"])
    scaled = kind == "yarn" or (kind is None and yarn["rotary_scaling_factor"] != 1)
    return {
        **{"multi_latent_attention": True, "rotary_interleaved": True, **sizes, **weights, **yarn},
        "softmax_scale": factor**2 / sqrt(sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]),
        **({"rotary_scaling": "yarn"} if scaled else {"rotary_scaling": "none", "rotary_scaling_factor": 1.0}),
    }


def _write_latents(model: ModelConfig) -> Mapping[str, Any]:
    if not model.multi_latent_attention:
        return {}
    same_names = (*_OF_LATENTS, "mscale", "mscale_all_dim")
    return {
        **{"multi_latent_attention": True, "rotary_interleaved": False},
        "rope_type": "yarn" if model.rotary_scaling == "yarn" else "rope",
        **{name: getattr(model, name) for name in same_names},
        **{name: getattr(model, ours) for name, (ours, _) in _YARN.items()},
    }


def _read_scaling(file: SettingsFile, fields: Fields) -> Fields:
    if file.value("use_rope_scaling", SWITCH, False):
        return {"rotary_scaling": "llama3", "rotary_scaling_factor": file.value("rope_scaling_factor", NUMBER, 8.0)}
    factor = file.value("rotary_seq_len_interpolation_factor", NUMBER, None, nullable=True)
    return {} if factor is None else {"rotary_scaling_factor": float(factor)}


def _write_scaling(model: ModelConfig) -> Mapping[str, Any]:
    factor = model.rotary_scaling_factor
    return {
        "use_rope_scaling": model.rotary_scaling == "llama3",
        "rope_scaling_factor": factor if model.rotary_scaling == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": int(factor) if model.rotary_scaling == "linear" else None,
    }


_SWITCHES: Mapping[str, str] = {
    "swiglu": "swiglu",
    "quick_geglu": "quick-geglu",
    "squared_relu": "squared-relu",
    "openai_gelu": "gelu",
}
"""Activation functions by their switches."""


def _read_activation(file: SettingsFile, fields: Fields) -> Fields:
    for key, ours in _SWITCHES.items():
        if file.value(key, SWITCH, False):
            return {"activation": ours}
    # The kernel that adds the bias has the tanh form; the function of torch without it is the exact one.
    fused = file.value("bias_gelu_fusion", SWITCH, True) and file.value("add_bias_linear", SWITCH, True)
    return {"activation": "gelu" if fused else "gelu-exact"}


def _write_activation(model: ModelConfig) -> Mapping[str, Any]:
    activation = model.activation
    return {
        **{key: activation == ours for key, ours in _SWITCHES.items()},
        "openai_gelu": activation == "gelu" and model.disable_bias_linear,
        "bias_gelu_fusion": activation == "gelu" and not model.disable_bias_linear,
    }


def _read_layers(file: SettingsFile, fields: Fields) -> Fields:
    """Return the windows, and the layers without rotations; the patterns are written as ours."""
    window = file.value("window_size", _ANY, None, nullable=True)
    found: dict[str, Any] = {}
    if window is not None:
        try:
            found["sliding_window"] = window_of_megatron(",".join(str(each) for each in window))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{file.where} sets window_size, and {error}") from None
    for key in ("window_attn_skip_freq", "no_rope_freq"):
        if (pattern := file.value(key, _ANY, None, nullable=True)) is not None:
            found[key] = str(pattern)
    return found


def _write_layers(model: ModelConfig) -> Mapping[str, Any]:
    window = model.sliding_window
    return {
        "window_size": None if window is None else (window - 1, 0),
        "window_attn_skip_freq": model.window_attn_skip_freq,
        "no_rope_freq": model.no_rope_freq,
    }


_OF_EXPERTS: Mapping[str, Kind] = {
    **dict.fromkeys(("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), COUNT),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk"), COUNT),
    **dict.fromkeys(("moe_router_pre_softmax", "moe_router_enable_expert_bias", "moe_shared_expert_gate"), SWITCH),
    "moe_router_topk_scaling_factor": NUMBER,
    "moe_router_score_function": Kind("softmax or sigmoid", lambda value: value in ("softmax", "sigmoid")),
}
"""Settings of layers of experts, named as ours; dense models have them, too."""


def _read_experts(file: SettingsFile, fields: Fields) -> Fields:
    if fields.get("num_experts") is None:
        return {}
    found = {name: file.value(name, kind, None, nullable=True) for name, kind in _OF_EXPERTS.items()}
    found["moe_layer_freq"] = str(file.value("moe_layer_freq", _ANY, 1))
    return {name: value for name, value in found.items() if value is not None}


NAMES = TensorNames(
    prefix="",
    words="embedding.word_embeddings",
    positions="embedding.position_embeddings",
    blocks="decoder.layers",
    query_key_value=("self_attention.linear_qkv",),
    grouped=True,
    query_norm="self_attention.q_layernorm",
    key_norm="self_attention.k_layernorm",
    projection="self_attention.linear_proj",
    sinks="self_attention.core_attention.softmax_offset",
    query_down="self_attention.linear_q_down_proj",
    latent_down="self_attention.linear_kv_down_proj",
    query_latent_norm="self_attention.q_layernorm",
    latent_norm="self_attention.kv_layernorm",
    query_up="self_attention.linear_q_up_proj",
    latent_up="self_attention.linear_kv_up_proj",
    latent_query="self_attention.linear_q_proj",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    router="mlp.router",
    router_bias="mlp.router.expert_bias",
    expert_up=("mlp.experts.experts.linear_fc1",),
    expert_down="mlp.experts.experts.linear_fc2",
    shared_up=("mlp.shared_experts.linear_fc1",),
    shared_down="mlp.shared_experts.linear_fc2",
    shared_gate="mlp.shared_experts.gate_weight",
    mlp_norm="pre_mlp_layernorm",
    final_norm="decoder.final_layernorm",
    output="output_layer",
    not_weights=("._extra_state", "rotary_pos_emb.inv_freq"),
    further=FurtherNames(
        begin="mtp.layers.{}.",
        block="mtp.layers.{}.transformer_layer.",
        first=0,
        words_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="final_layernorm",
    ),
)
"""Names of the tensors of megatron-core's `GPTModel`, with its own layers."""

MEGATRON = Family(
    name="Megatron-LM",
    owner="",
    architecture="GPTModel",
    settings=(
        *(
            same(name, name, COUNT, None)
            for name in (
                *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
                *("max_position_embeddings", "make_vocab_size_divisible_by", "vocab_size"),
            )
        ),
        Setting(
            ("group_query_attention", "num_query_groups"),
            _read_key_heads,
            lambda model: {
                "group_query_attention": model.num_key_value_heads != model.num_attention_heads,
                "num_query_groups": model.num_key_value_heads,
            },
        ),
        Setting(
            (
                *("position_embedding_type", "use_rotary_position_embeddings", "add_position_embedding"),
                *(f"yarn_{name}" for name in (*_YARN, "correction_range_round_to_int")),
            ),
            _read_positions,
            lambda model: {"position_embedding_type": model.position_embedding_type},
        ),
        *(same(name, name, NUMBER, None) for name in ("rotary_base", "rotary_percent", "softmax_scale")),
        same("rotary_interleaved", "rotary_interleaved", SWITCH, False),
        Setting(
            ("use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"),
            _read_scaling,
            _write_scaling,
        ),
        Setting(
            ("multi_latent_attention", "rope_type", *_OF_LATENTS, "mscale", "mscale_all_dim", *_YARN),
            _read_latents,
            _write_latents,
        ),
        Setting((*_SWITCHES, "bias_gelu_fusion"), _read_activation, _write_activation),
        same("activation_func_clamp_value", "activation_func_clamp_value", NUMBER, None),
        same("glu_linear_offset", "glu_linear_offset", NOT_NEGATIVE, 0.0),
        opposite("add_bias_linear", "disable_bias_linear", True),
        same("add_qkv_bias", "add_qkv_bias", SWITCH, False),
        word("normalization", "normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
        same("layernorm_epsilon", "layernorm_epsilon", NUMBER, None),
        same("norm_epsilon", "layernorm_epsilon", NUMBER, None),  # Its name since 2023.
        same("apply_layernorm_1p", "apply_layernorm_1p", SWITCH, False),
        word("qk_layernorm", "qk_norm", {False: "none", True: "head"}, False),
        same("attention_output_gate", "attention_output_gate", SWITCH, False),
        same("untie_embeddings_and_output_weights", "untie_embeddings_and_output_weights", SWITCH, False),
        Setting(("window_size", "window_attn_skip_freq", "no_rope_freq"), _read_layers, _write_layers),
        same("heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path", WORD, None),
        *(
            fixed(name, None, False, 0, 0.0)
            for name in (
                *("moe_apply_probs_on_input", "moe_latent_size", "mtp_use_repeated_layer", "mtp_hsm"),
                *("hybrid_override_pattern", "is_hybrid_model", "experimental_attention_variant", "qk_l2_norm"),
                *("linear_attention_freq", "use_mup", "yarn_mscale_all_dim", "hybrid_layer_pattern"),
                *("apply_residual_connection_post_layernorm", "retro_add_retriever"),
            )
        ),
        word("softmax_type", "softmax_type", {"vanilla": "vanilla", "learnable": "learnable"}, "vanilla"),
        same("mtp_num_layers", "mtp_num_layers", NATURAL, None),
        same("num_experts", "num_experts", COUNT, None),
        Setting(("moe_layer_freq", *_OF_EXPERTS), _read_experts),
        written(
            **{name: name for name in ("init_method_std", "hidden_dropout", "attention_dropout", "seq_length")},
            mtp_loss_scaling_factor="mtp_loss_scaling_factor",
        ),
    ),
    tensors=NAMES,
)
"""The GPTs of Megatron-LM, in its own names of arguments and of tensors."""
