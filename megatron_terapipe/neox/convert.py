"""GPT-NeoX's settings, converted to flags of the trainer.

YAML files -> read_settings -> convert -> Conversion: the command, remarks on settings left out, or a refusal

Settings that need no rule of their own are rows of `settings.toml`. Read `convert`, at the end, first.
"""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import prod, sqrt
from pathlib import Path, PurePath
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import option_of
from megatron_terapipe.config.parsing import check_host_name, parse_yaml
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN, ConfigError


def paths_of(names: Iterable[str], directory: str | None = None) -> list[str]:
    """Return the paths of configuration files, which may be named without `.yml`, as NeoX's launcher takes them."""
    named = (name if name.endswith((".yml", ".yaml", ".json")) else f"{name}.yml" for name in names)
    return [str(PurePath(directory or "", name)) for name in named]


def read_settings(paths: Iterable[str]) -> dict[str, Any]:
    """Read files and merge them, as NeoX does: dashes are underscores, and no key may appear twice."""
    settings: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    for path in paths:
        document = parse_yaml(read_text(path), path)
        if not isinstance(document, dict):
            raise ConfigError(f"{path} is not a mapping of settings to values: write one")
        for key, value in document.items():
            name = str(key).replace("-", "_")
            if came_from.get(name) == path:
                raise ConfigError(f"{path} sets {name} twice: remove one")
            if name in settings:
                raise ConfigError(f"{path} sets {name}, and so does {came_from[name]}: remove it from one of them")
            settings[name], came_from[name] = value, path
    return settings


@cache
def table() -> dict[str, Any]:
    """Return the table of settings, by part; reasons of operation by key."""
    import tomllib

    found = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
    found["operation"] = {key: reason for reason, keys in found["operation"].items() for key in keys.split()}
    return found


SINCE_2023_12 = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "weight_decay": 0.1}
"""Defaults of NeoX that changed in December 2023."""

BEFORE_2023_12 = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "weight_decay": 0.01}
"""Those until then, version 2.0 included."""


@dataclass(kw_only=True, slots=True)
class Conversion:
    """A conversion under way: settings are taken from it; flags, remarks and refusals are put into it.

    A default that a method takes is NeoX's.
    """

    settings: Mapping[str, Any]
    """NeoX's settings by key; null is NeoX's default. `a.b` is the key of b in the section a."""

    defaults: Mapping[str, float] = field(default_factory=lambda: SINCE_2023_12)
    """Defaults that have changed, by key."""

    flags: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the trainer, each with its values."""

    launcher: list[tuple[str, ...]] = field(default_factory=list)
    """Flags of the launcher."""

    refusals: list[str] = field(default_factory=list)
    """Settings that change the training and have no counterpart, each with its value and the reason."""

    remarks: list[tuple[str, str]] = field(default_factory=list)
    """Settings of operation that the command leaves out, or expresses in another way, each with the reason."""

    taken: set[str] = field(default_factory=set)
    """Keys that have been converted."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return a setting, and mark it as converted."""
        section, _, name = key.rpartition(".")
        self.taken.add(key)
        value = (self.section(section) if section else self.settings).get(name)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a setting that is a number."""
        return as_number(key, self.take(key, default))

    def count(self, key: str, default: int | None = None) -> int | None:
        """Return a setting that is a whole number."""
        return as_count(key, self.take(key, default))

    def several(self, key: str) -> list[Any]:
        """Return a setting that is a list; empty if it is not set."""
        value = self.take(key, [])
        if not isinstance(value, list):
            raise ConfigError(f"{key} {value!r} is not a list: write it as [...]")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """Return a setting that holds others."""
        value = self.take(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} {value!r} is not a mapping: write it as {{...}}")
        return {str(name): inner for name, inner in value.items() if inner is not None}

    def one_of_two(self, first: str, second: str, both: str) -> tuple[Any, Any]:
        """Return two numbers, of which at most one may be given; `both` is the verb phrase about their purpose."""
        values = self.number(first), self.number(second)
        if None not in values:
            raise ConfigError(f"{first} {values[0]} and {second} {values[1]} both {both}: remove one")
        return values

    def choice(self, key: str, default: str, end: str = MODEL_CANNOT_BE_TRAINED) -> str:
        """Return a setting that is one of a few words, refused if it is another."""
        value = str(self.take(key, default))
        known, reason = table()["choices"][key]
        if value not in known:
            self.refuse(f"{key} {value}", reason, end)
        return value

    def flag(self, name: str, *values: object) -> None:
        """Add a flag to the command."""
        self.flags.append((name, *map(str, values)))

    def flags_of(self, part: str, read: Callable[..., Any], *, when: object = True) -> None:
        """Add the flags of a part of the table, where it counts; its settings are taken in any case."""
        for key, (flag, *default) in table()[part].items():
            value = read(key, *default)
            if when and value is not None:
                self.flag(flag, value)

    def refuse(self, setting: str, reason: str, end: str = MODEL_CANNOT_BE_TRAINED) -> None:
        """Record a setting without which another model would be trained, or in another way."""
        # A value of YAML may have several lines; an error has one.
        self.refusals.append(" ".join(f"{setting}: {reason}: {end}".split()))

    def remark(self, setting: str, reason: str) -> None:
        """Record a setting of operation that has no flag."""
        self.remarks.append((" ".join(setting.split()), reason))

    def check(self) -> None:
        """Raise a ConfigError that names all settings refused, if there are any."""
        if self.refusals:
            raise ConfigError("; ".join(self.refusals))

    def words(self) -> list[str]:
        """Return the words after the name of the trainer."""
        return [word for flag in self.flags for word in flag]

    def command(self) -> str:
        """Return the command, a flag a line, as a shell reads it."""
        launch = " ".join(["terapipe train", *map(shlex.join, self.launcher)])
        return " \\\n    ".join([launch, *map(shlex.join, self.flags)]) + "\n"

    def comments(self) -> Iterator[str]:
        """Yield the remarks, those with one reason in one line."""
        settings_by_reason = defaultdict(list)
        for setting, reason in self.remarks:
            settings_by_reason[reason].append(setting)
        for reason, settings in settings_by_reason.items():
            yield f"{', '.join(settings)}: {reason}"


MOST_NUMBER = 1e36
"""Numbers are below this: loss scales come next to it."""


def as_number(key: str, value: Any) -> Any:
    """Return a value that must be a number or None. YAML reads 1e-4 as text, because it has no point."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{key} {value} is not a number: give one") from None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{key} {value!r} is not a number: give one")
    if value is not None and not abs(value) < MOST_NUMBER:
        raise ConfigError(f"{key} {value!r} is beyond {MOST_NUMBER:g}: give less")
    return value


def as_count(key: str, value: Any) -> int | None:
    """Return a value that must be a whole number or None."""
    number = as_number(key, value)
    if number is not None and number != int(number):
        raise ConfigError(f"{key} {number} is not a whole number: give one")
    return None if number is None else int(number)


POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {
    "layernorm": ("layernorm", "layernorm_epsilon"),
    "te_layernorm": ("layernorm", "layernorm_epsilon"),
    "rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
    "te_rmsnorm": ("rmsnorm", "rms_norm_epsilon"),
}
"""Type of the trainer's norm, and the setting of its epsilon."""

EPSILONS = {"layernorm_epsilon": 1e-5, "rms_norm_epsilon": 1e-8}
"""NeoX's defaults; Transformer Engine's norms within the MLP always have them."""


def convert_positions_and_norms(conversion: Conversion) -> None:
    """Convert positions and norms."""
    name = conversion.choice("pos_emb", "learned")
    percent, base = conversion.number("rotary_pct", 1.0), conversion.number("rotary_emb_base", 10000)
    if name in POSITIONS:
        conversion.flag("--position-embedding-type", POSITIONS[name])
    if name == "rotary":
        conversion.flag("--rotary-base", base)
        conversion.flag("--rotary-percent", percent)
    name = conversion.choice("norm", "layernorm")
    epsilons = {key: conversion.number(key, default) for key, default in EPSILONS.items()}
    if name not in NORMS:
        return
    ours, key = NORMS[name]
    if not conversion.take("use_bias_in_norms", True) and ours == "layernorm":
        ours = "layernorm-no-bias"
    if conversion.settings.get("te_layernorm_mlp") and epsilons[key] != EPSILONS[key]:
        reason = f"with te_layernorm_mlp NeoX gives the MLP's norm {EPSILONS[key]}, and here all norms have one epsilon"
        conversion.refuse(f"{key} {epsilons[key]}", reason)
    conversion.flag("--normalization", ours)
    conversion.flag("--layernorm-epsilon", epsilons[key])


NOT_ATTENTION = {
    "mamba": "Mamba layers are not in this trainer",
    "rwkv": "recurrent layers are not in this trainer",
    "gmlp": "MLPs over positions are not in this trainer",
    "amlp": "MLPs over positions are not in this trainer",
}
"""Kinds of layers without attention, or with another, and the reason why they are refused."""


def convert_attention(conversion: Conversion) -> None:
    """Convert heads, kinds and windows; layers without attention end the conversion."""
    groups = conversion.count("num_kv_heads")
    if groups:
        conversion.flag("--num-key-value-heads", groups)
    kinds = layer_kinds(conversion.take("attention_config"), conversion.count("num_layers"))
    for kind in sorted(set(kinds) - {"global", "flash"}):
        conversion.refuse(f"attention_config {kind}", NOT_ATTENTION.get(kind, "attention is global"))
    if NOT_ATTENTION.keys() & set(kinds):
        conversion.check()
    # NeoX's window counts the tokens before a token, and only its flash layers have it.
    width = conversion.count("sliding_window_width")
    with_window = [int(kind == "flash") for kind in kinds]
    if width is None:
        return
    if conversion.settings.get("te_mha"):
        conversion.refuse(f"sliding_window_width {width}", "Transformer Engine takes two numbers", "leave te_mha out")
    elif not any(with_window):
        conversion.remark("sliding_window_width", "NeoX gives a window only to flash layers, and there are none")
    else:
        conversion.flag("--sliding-window", width + 1)
        if not all(with_window):
            conversion.flag("--window-attn-skip-freq", str(with_window).replace(" ", ""))


MOST_LAYERS = 10_000
"""Layers of a model at most, as in `--num-layers`."""


def layer_kinds(config: Any, num_layers: int | None) -> list[str]:
    """Return the kind of each layer from `[[["global", "flash"], 6]]`, or from a kind for each layer; None = global."""
    if config is None:
        return ["global"] * (num_layers or 1)
    kinds: list[str] = []
    try:
        for entry in config:
            if isinstance(entry, str):
                kinds.append(entry)
                continue
            pattern, times = entry
            if times == "all":
                times = (num_layers or len(pattern)) // len(pattern)
            if times * max(len(pattern), 1) > MOST_LAYERS:
                raise ValueError("too many layers")
            kinds += [str(kind) for kind in pattern] * times
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f'attention_config {config!r} is not a list such as [[["flash"], 12]]: write one') from None
    if num_layers is not None and len(kinds) != num_layers:
        raise ConfigError(
            f"attention_config describes {len(kinds)} layers and num_layers is {num_layers}: describe each layer once"
        )
    return kinds


ACTIVATIONS = {"gelu": "gelu-exact", "relu": "relu", "swiglu": "swiglu", "geglu": "geglu-exact"}
"""NeoX's GELU has the error function; its fused kernel has the tanh form."""

TRANSFORMER_ENGINE = {
    **ACTIVATIONS,
    **{"gelu": "gelu", "geglu": "geglu", "squared_relu": "squared-relu", "srelu": "squared-relu"},
}
"""Activations of `te_layernorm_mlp`, whose GELU has the tanh form."""

GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
"""Activations that double the first matrix in NeoX, whether they are here or not."""


def convert_mlp(conversion: Conversion) -> None:
    """Convert activation and width."""
    name = conversion.take("activation", "gelu")
    fused = conversion.take("bias_gelu_fusion", False) or conversion.take("openai_gelu", False)
    engine = bool(conversion.take("te_layernorm_mlp", False))
    older = conversion.choice("mlp_type", "regular")
    activation = (TRANSFORMER_ENGINE if engine else ACTIVATIONS).get(name)
    if older == "llama":
        activation = "swiglu" if name in ("silu", "swish", "swiglu") else None
    elif older == "regular" and name == "gelu" and fused:
        activation = "gelu"
    hidden_size = conversion.count("hidden_size")
    given, factor = conversion.count("intermediate_size"), conversion.number("expansion_factor")
    if given and factor:
        raise ConfigError(f"intermediate_size {given} and expansion_factor {factor} both size the MLP: remove one")
    asked = given or (int(factor * (hidden_size or 0)) if factor else None)
    multiple = conversion.count("mlp_multiple_of") or None
    if activation is None:
        conversion.refuse(f"activation {name}", "it can be gelu, relu, swiglu or geglu")
        return
    conversion.flag("--activation", activation)
    if hidden_size is None:
        return
    if older == "llama":  # NeoX's older gated MLP has the width given, otherwise two thirds of 4h.
        width, multiple = asked or int(2 * 4 * hidden_size / 3), multiple or 256
    else:
        width = asked or 4 * hidden_size
        if name in GATED:
            # Two thirds of the width given, and half of that on each side; all of it in Transformer Engine's.
            width = int(width * 2 / 3) if engine else int(width * 2 / 3) // 2
        multiple = (1 + engine) * (multiple or 1)
    conversion.flag("--ffn-hidden-size", -(-width // multiple) * multiple)


def convert_experts(conversion: Conversion) -> None:
    """Convert experts, which have no gates and no biases, and are dealt to the ranks of `model_parallel_size`."""
    if not _has_experts(conversion):
        conversion.take("moe_router_type")
        return
    conversion.choice("moe_router_type", "sinkhorn", TRAINING_CANNOT_BE_RUN)
    if conversion.take("activation", "gelu") in GATED or conversion.take("mlp_type") == "llama":
        conversion.refuse(f"activation {conversion.take('activation')}", "experts of NeoX have no gates")
    interval, jitter = conversion.count("moe_expert_interval", 1) or 1, conversion.number("moe_jitter_eps")
    if interval > 1 and conversion.take("use_bias_in_mlp", True):
        conversion.refuse("use_bias_in_mlp true", "experts of NeoX have no biases, and here all MLPs are alike")
    # The softmax is over all experts, and layers are counted from 0.
    conversion.flag("--num-experts", conversion.count("moe_num_experts"))
    conversion.flag("--moe-router-topk", conversion.count("moe_top_k", 1))
    conversion.flag("--moe-router-pre-softmax")
    conversion.flag("--moe-layer-freq", interval)
    width = conversion.count("intermediate_size") or -(-4 * (conversion.count("hidden_size") or 0) // 256) * 256
    conversion.flag("--moe-ffn-hidden-size", width)
    if jitter:
        conversion.flag("--moe-input-jitter-eps", jitter)
    ranks = conversion.count("model_parallel_size", 1) or 1
    if ranks > 1:
        conversion.flag("--expert-model-parallel-size", ranks)
        if not conversion.take("sequence_parallel", False):
            conversion.flag("--sequence-parallel")
            conversion.remark("sequence_parallel", "with experts tensor-parallel ranks have tokens of their own")


def _has_experts(conversion: Conversion) -> bool:
    return (conversion.count("moe_num_experts", 1) or 1) > 1


def convert_biases_and_dropout(conversion: Conversion) -> None:
    """Convert biases, how attention and MLP are added, and dropout."""
    # NeoX's older gated MLP has no biases, and Transformer Engine's layers are always built with them.
    attention = bool(conversion.take("use_bias_in_attn_linear", True) or conversion.settings.get("te_mha"))
    mlp = bool(conversion.take("use_bias_in_mlp", True)) and conversion.take("mlp_type") != "llama"
    mlp = (mlp or bool(conversion.settings.get("te_layernorm_mlp"))) and not _has_experts(conversion)
    if not (attention and mlp):
        conversion.flag("--disable-bias-linear")
    if attention and not mlp:
        conversion.flag("--add-attention-bias")
    if mlp and not attention:
        conversion.flag("--add-mlp-bias")
    parallel, tied = conversion.take("gpt_j_residual", False), conversion.take("gpt_j_tied", False)
    if parallel:
        conversion.flag("--parallel-residual")
    if parallel and tied:
        conversion.flag("--shared-block-norm")
    if parallel and not mlp:
        reason = "attention and MLP add up in every layer; NeoX loses the attention of layers whose MLP has no biases"
        conversion.remark("gpt_j_residual", reason)
    hidden = conversion.number("hidden_dropout", conversion.defaults["hidden_dropout"])
    conversion.flag("--hidden-dropout", hidden)
    attention_dropout = conversion.number("attention_dropout", conversion.defaults["attention_dropout"])
    conversion.flag("--attention-dropout", attention_dropout)
    if hidden and not (mlp and (attention or not parallel)):
        reason = (
            "NeoX has no dropout where a matrix has no bias, and here dropout does not depend on biases: set it to 0"
        )
        conversion.refuse(f"hidden_dropout {hidden}", reason)


NOT_NORMAL = ("orthogonal", "scaled_orthogonal", "xavier_uniform", "xavier_normal")
"""Methods of NeoX whose numbers are not drawn from one normal distribution."""


def convert_initial_weights(conversion: Conversion) -> None:
    """Convert the standard deviation of most initial weights, and that of writers to the residual stream."""
    std = conversion.number("init_method_std", 0.02)
    methods = {
        ("init_method", "--init-method-std"): conversion.take("init_method", "normal"),
        ("output_layer_init_method", "--output-layer-init-std"): conversion.take(
            "output_layer_init_method", "scaled_normal"
        ),
    }
    hidden_size, layers = conversion.count("hidden_size"), conversion.count("num_layers")
    if not hidden_size or not layers:
        return
    for (key, flag), method in methods.items():
        start = standard_deviation(method, std, hidden_size=hidden_size, num_layers=layers)
        if start is None:
            reason = "weights start from a normal distribution" if method in NOT_NORMAL else "not a method of NeoX"
            conversion.refuse(f"{key} {method}", reason, TRAINING_CANNOT_BE_RUN)
        else:
            conversion.flag(flag, repr(start))


def standard_deviation(method: str, std: float, *, hidden_size: int, num_layers: int) -> float | None:
    """Return the standard deviation of a method of NeoX; None if it is not one number for every matrix."""
    known = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * num_layers),
        # One residual a layer instead of two.
        "single_residual_scaled_normal": std / sqrt(num_layers),
        # Nguyen and Salazar, arXiv 1910.05895, section 2.2: Xavier's for a matrix of d x 4d.
        "small_init": sqrt(2 / (5 * hidden_size)),
        # GPT-J's, by its author Ben Wang.
        "wang_init": 2 / (num_layers * sqrt(hidden_size)),
    }
    return known.get(method)


def convert_parallel(conversion: Conversion) -> None:
    """Convert the ranks that share layers, the stages, and how layers are dealt to them; 0 means 1."""
    conversion.flag("--tensor-model-parallel-size", max(1, conversion.count("model_parallel_size", 1) or 1))
    stages = max(1, conversion.count("pipe_parallel_size", 0) or 1)
    conversion.flag("--pipeline-model-parallel-size", stages)
    method = conversion.take("pipe_partition_method", "type:transformer|mlp")
    if stages > 1:
        conversion.flag("--stage-partition", "parameters" if method == "parameters" else "uniform")
        if not str(method).startswith("type:transformer") and method != "parameters":
            reason = "stages get the same number of transformer layers; see --stage-partition"
            conversion.remark("pipe_partition_method", reason)


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def convert_batch(conversion: Conversion, world_size: int | None) -> None:
    """Convert the batch sizes. NeoX computes the global batch size from the others and the number of processes."""
    given = {key: None if conversion.take(key) == "auto" else conversion.count(key) for key in BATCH}
    whole, micro, accumulated = given.values()
    replicas = _replicas(conversion, world_size)
    if replicas is not None and whole is not None and micro is None:
        micro = whole // (replicas * (accumulated or 1))
    if replicas is not None and whole is None and micro is not None:
        whole = micro * replicas * (accumulated or 1)
    sequences = (micro or 1) * (replicas or 1) * (accumulated or 1)
    if micro == 0 or (whole is not None and (whole % sequences or (replicas and accumulated and whole != sequences))):
        listed = ", ".join(f"{key} {value}" for key, value in given.items() if value is not None)
        ranks = f"{replicas} data-parallel ranks" if replicas else "each other"
        raise ConfigError(f"{listed} do not fit {ranks}: change one of them")
    if micro is None and whole is not None:
        raise ConfigError(f"{BATCH[0]} {whole} is dealt to the processes of the run: give their number, --world-size N")
    if micro is not None and whole is None and (accumulated or 1) > 1:
        raise ConfigError(
            f"{BATCH[2]} {accumulated} makes a batch that grows with the processes of the run: give their number, "
            "--world-size N"
        )
    if micro is not None:
        conversion.flag("--micro-batch-size", micro)
    if whole is not None:
        conversion.flag("--global-batch-size", whole)


def _replicas(conversion: Conversion, world_size: int | None) -> int | None:
    """Return the data-parallel size, if it can be known."""
    everywhere = conversion.count("global_num_gpus")
    machine = [conversion.settings.get(key) for key in ("num_nodes", "num_gpus")]
    if world_size is None and everywhere:
        world_size = everywhere
    if world_size is None and all(isinstance(count, int) and count > 0 for count in machine):
        world_size = prod(machine)  # type: ignore[arg-type]
    if world_size is None:
        return None
    # 0 means 1.
    ranks = prod(max(1, conversion.count(key) or 1) for key in ("pipe_parallel_size", "model_parallel_size"))
    if world_size % ranks:
        raise ConfigError(
            f"{world_size} processes are not a multiple of the {ranks} ranks of a model: change one of them"
        )
    return world_size // ranks


ADAMS = ("adam", "adamw", "cpu_adam", "cpu_torch_adam")
PARAMETERS = {"lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode", "adamw_mode"}
"""Parameters of an optimizer that are read here, or have no effect."""


def convert_optimizer(conversion: Conversion) -> float:
    """Convert the optimizer, but for its learning rate over time; return the highest rate."""
    params, number = conversion.section("optimizer.params"), conversion.number
    kind = str(conversion.take("optimizer.type", "Adam")).lower()
    decay = number("weight_decay", params.get("weight_decay", conversion.defaults["weight_decay"]))
    if kind == "sgd":
        conversion.flag("--optimizer", "sgd")
        conversion.flag("--sgd-momentum", number("optimizer.params.momentum", 0.0))
    elif kind in ADAMS:
        conversion.flag("--optimizer", "adam")
        betas = params.get("betas", (0.9, 0.999))
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise ConfigError(f"optimizer.params.betas {betas!r} are not two numbers: write them as [0.9, 0.95]")
        for name, beta in zip(("--adam-beta1", "--adam-beta2"), betas, strict=True):
            conversion.flag(name, as_number("optimizer.params.betas", beta))
        conversion.flag("--adam-eps", number("optimizer.params.eps", 1e-8))
    else:
        conversion.refuse(f"optimizer {kind}", "it can be adam or sgd", TRAINING_CANNOT_BE_RUN)
    if kind.startswith("cpu"):
        conversion.remark(f"optimizer {kind}", "the optimizer stays on the accelerator")
    if decay and False in (params.get("adam_w_mode"), params.get("adamw_mode")):
        reason = "weights decay apart from the gradient"
        conversion.refuse(f"weight_decay {decay} in the gradient", reason, TRAINING_CANNOT_BE_RUN)
    for name in sorted(set(params) - PARAMETERS):
        conversion.refuse(f"optimizer.params.{name}", "the optimizer has no such parameter", TRAINING_CANNOT_BE_RUN)
    highest = number("optimizer.params.lr", 0.001)
    conversion.flag("--lr", highest)
    conversion.flag("--weight-decay", decay)
    conversion.flag("--clip-grad", number("gradient_clipping", 1.0))
    return float(highest)


def convert_learning_rate(conversion: Conversion, highest: float) -> None:
    """Convert rise and decay. Files of Llemma give the rise in iterations, and the lowest rate as a share."""
    style = conversion.choice("lr_decay_style", "linear", TRAINING_CANNOT_BE_RUN)
    rate, share = conversion.one_of_two("min_lr", "decay_lr_to", "give the lowest rate")
    lowest = float(rate or 0.0 if share is None else share * highest)
    conversion.flag("--lr-decay-style", style)
    conversion.flag("--min-lr", lowest)
    iterations, end = conversion.count("train_iters"), conversion.count("lr_decay_iters")
    _, fraction = conversion.one_of_two("lr_decay_iters", "lr_decay_fraction", "end the decay")
    if fraction is not None and iterations is not None:
        end = int(fraction * iterations)
    last = end or iterations
    warmup, rise = conversion.one_of_two("warmup", "warmup_iters", "set the length of the rise")
    warmup = float(rise / last) if rise is not None and last else 0.01 if warmup is None else float(warmup)
    if style == "linear" and lowest and last is not None:
        end, fraction, exact = cut_off(last, warmup, highest=highest, lowest=lowest)
        conversion.flag("--lr-decay-iters", end)
        conversion.flag("--lr-warmup-fraction", repr(fraction))
        if not exact:
            reason = f"min_lr is reached within half an iteration of where NeoX reaches it, at {end}"
            conversion.remark("lr_decay_style", reason)
        return
    if end is not None:
        conversion.flag("--lr-decay-iters", end)
    conversion.flag("--lr-warmup-fraction", warmup)
    if style == "cosine" and end is not None and iterations is not None and end < iterations:
        conversion.remark("lr_decay_iters", f"the rate stays at min_lr after {end}; NeoX's cosine rises again")


def cut_off(last: int, warmup: float, *, highest: float, lowest: float) -> tuple[int, float, bool]:
    """Return the decay that equals NeoX's linear one, which aims at 0 and is cut off at `min_lr`.

    The values are the iteration at which the rate is `min_lr`, the iterations of the rise as a share of those, and
    whether the shape is NeoX's to the last digit.

    NeoX's rate falls from its peak at iteration W on a line to 0 at iteration E. It has come down to the lowest rate at
    W + (E - W)(1 - lowest / highest), where the trainer's line ends.
    """
    rise = warmup * last
    reached = rise + (last - rise) * (1 - lowest / highest)
    end = max(1, round(reached))
    return end, rise / end, abs(end - reached) <= 1e-9 * last


def convert_precision(conversion: Conversion) -> str:
    """Convert number types and loss scaling. Returns `fp32`, `fp16` or `bf16`."""
    half, brain = conversion.section("fp16"), conversion.section("bf16")
    precision = {"bfloat16": "bf16", "bf16": "bf16", "fp16": "fp16"}.get(str(conversion.take("precision")), "fp32")
    if brain.get("enabled") or (half.get("enabled") and half.get("type") == "bfloat16"):
        precision = "bf16"
    elif half.get("enabled"):
        precision = "fp16"
    for owner, names in table()["number-types"].items():
        for name, value in conversion.section(owner).items():
            if name not in names.split() and value:
                remedy = "give it in a file for --deepspeed-config, and leave it out here"
                conversion.refuse(f"{owner}.{name}", "no flag decides it", remedy)
    if precision != "fp32":
        conversion.flag(f"--{precision}")
    if precision != "fp16":
        return precision
    if conversion.take("data_types.grad_accum_dtype") == "fp32":
        conversion.flag("--accumulate-allreduce-grads-in-fp32")
    scale = conversion.number("fp16.loss_scale", 0)
    if scale:
        conversion.flag("--loss-scale", scale)
    conversion.flag("--initial-loss-scale", 2 ** int(conversion.number("fp16.initial_scale_power", 16)))
    conversion.flags_of("fp16", conversion.count)
    return precision


def convert_zero(conversion: Conversion, precision: str) -> None:
    """Convert the ZeRO stage. All stages compute the same update."""
    stage = int(conversion.number("zero_optimization.stage", 0))
    ours = min(stage, 1)
    if stage > 1:
        reason = "ZeRO 2 and 3 do not go with pipelines; 1 computes the same, with more memory"
        conversion.remark(f"zero_optimization.stage {stage}", reason)
    if ours == 0 and precision != "fp32":
        ours = 1
        conversion.remark("zero_optimization.stage 0", f"{precision} takes ZeRO 1 here; it computes the same")
    conversion.flag("--zero-stage", ours)
    conversion.flags_of("zero-sizes", conversion.count)
    rest = conversion.section("zero_optimization")
    for name in ("reduce_scatter", "contiguous_gradients"):
        if rest.get(name) is True:
            conversion.flag(f"--zero-{name.replace('_', '-')}")
            rest.pop(name)
    for name, value in rest.items():
        if (
            value is not False and f"zero_optimization.{name}" not in conversion.taken
        ):  # A setting that is off needs no remark.
            offload = "offload" in name
            reason = (
                "states and weights stay on the accelerator" if offload else "a file for --deepspeed-config can have it"
            )
            conversion.remark(f"zero_optimization.{name}", reason)


def convert_data(conversion: Conversion) -> None:
    """Convert the data and the tokenizer, whose file NeoX names `vocab_file`, whatever it is."""
    path = conversion.take("data_path")
    split = str(conversion.take("split", "969, 30, 1")).replace(" ", "")
    if path is not None:
        conversion.flag("--data-path", path)
        conversion.flag("--split", split)
    for part in ("train", "valid", "test"):
        single = conversion.take(f"{part}_data_paths")
        paths = [single] if isinstance(single, str) else conversion.several(f"{part}_data_paths")
        weights = conversion.several(f"{part}_data_weights") or [1.0] * len(paths)
        if len(weights) != len(paths):
            raise ConfigError(
                f"{part}_data_weights has {len(weights)} entries and {part}_data_paths {len(paths)}: give one for each"
            )
        pairs = [word for pair in zip(weights, paths, strict=True) for word in pair]
        if paths:
            conversion.flag(f"--{part}-data-path", *(pairs if len(paths) > 1 else paths))
    kind = conversion.choice("tokenizer_type", "GPT2BPETokenizer", "tokenize the data with another")
    vocabulary, merges = conversion.take("vocab_file"), conversion.take("merge_file")
    own = kind == "GPT2BPETokenizer"
    files = {"--vocab-file": vocabulary, "--merge-file": merges} if own else {"--tokenizer-model": vocabulary}
    conversion.flag("--tokenizer-type", kind)
    for flag, name in files.items():
        if name is not None:
            conversion.flag(flag, name)


def convert_checkpoints(conversion: Conversion) -> None:
    """Convert when checkpoints are saved."""
    factor, scale = conversion.count("checkpoint_factor"), conversion.take("checkpoint_scale", "linear")
    extra = sorted({as_count("extra_save_iters", each) or 0 for each in conversion.several("extra_save_iters")})
    kept = conversion.count("keep_last_n_checkpoints")
    older = conversion.count("save_interval")
    if conversion.settings.get("save") is not None:
        if scale == "log":
            conversion.remark("checkpoint_scale log", "give the iterations to --extra-save-iterations")
        elif factor or older:
            conversion.flag("--save-interval", factor or older)
        if extra:
            conversion.flag("--extra-save-iterations", *extra)
        if kept:
            conversion.flag("--keep-last-n-checkpoints", kept)
    if conversion.settings.get("load") is not None:
        reason = (
            "it takes checkpoints of this trainer, and in Hugging Face's format, to which NeoX's tools convert its own"
        )
        conversion.remark("load", reason)


def convert_launch(conversion: Conversion) -> None:
    """Convert how processes are started."""
    first_host = conversion.take("master_addr")
    if first_host is not None:
        check_host_name(str(first_host), "master_addr")
    hostfile = conversion.settings.get("hostfile")
    is_missing = hostfile is not None and not Path(str(hostfile)).is_file()
    if is_missing:
        reason = "it is not here, and DeepSpeed starts ranks on this machine then: add --hostfile for others"
        conversion.remark(f"hostfile {hostfile}", reason)
    for key, (flag, *needless) in table()["launcher"].items():
        value = conversion.take(key)
        if value is not None and value not in needless and not (is_missing and key == "hostfile"):
            conversion.launcher.append((flag, str(value)))
    comment = conversion.take("comment")
    if comment is not None:
        # DeepSpeed splits this into words as a shell does: a comment of several must come out as one.
        conversion.launcher.append((f"--launcher-args={shlex.quote(f'--comment={comment}')}",))
    for key, launcher in (("deepspeed_slurm", "slurm"), ("deepspeed_mpi", "openmpi")):
        if conversion.take(key, False) and conversion.settings.get("launcher") is None:
            conversion.launcher.append(("--launcher", launcher))


def convert(
    settings: Mapping[str, Any], world_size: int | None = None, *, defaults: Mapping[str, float] = SINCE_2023_12
) -> Conversion:
    """Convert settings.

    Args:
        world_size: processes of the run; None = not known.
    """
    conversion = Conversion(settings=_with_extra_settings(settings), defaults=defaults)
    _check_sizes(conversion)
    conversion.flags_of("values", conversion.take)
    for key, flag in table()["switches"].items():
        if conversion.take(key, False):
            conversion.flag(flag)
    convert_positions_and_norms(conversion)
    convert_attention(conversion)
    convert_mlp(conversion)
    convert_experts(conversion)
    convert_biases_and_dropout(conversion)
    convert_initial_weights(conversion)
    convert_parallel(conversion)
    convert_batch(conversion, world_size)
    convert_learning_rate(conversion, convert_optimizer(conversion))
    convert_zero(conversion, convert_precision(conversion))
    layers = conversion.count("checkpoint_num_layers", 1) or 1
    if conversion.take("checkpoint_activations", False):
        conversion.flag("--recompute-granularity", "full")
        conversion.flag("--recompute-num-layers", layers)
    convert_data(conversion)
    convert_checkpoints(conversion)
    conversion.flags_of("wandb", conversion.take, when=conversion.take("use_wandb"))
    profiled = conversion.take("profile")
    if profiled:
        conversion.flag("--profile")
    conversion.flags_of("profile", conversion.count, when=profiled)
    convert_launch(conversion)
    _check_the_rest(conversion)
    return conversion


NEEDED = (
    *(("num_layers",), ("hidden_size",), ("num_attention_heads",), ("seq_length",), ("optimizer",), ("train_iters",)),
    ("train_micro_batch_size_per_gpu", "train_batch_size"),
    ("data_path", "train_data_paths"),
    ("vocab_file",),
)
"""Settings that every run needs; of several, one is enough."""


def left_open(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that a run needs and the files do not give."""
    return [either[0] for either in NEEDED if all(settings.get(key) is None for key in either)]


def _check_sizes(conversion: Conversion) -> None:
    """Check the sizes from which others are computed; the trainer checks all others."""
    most = {each.name: option_of(each).most for each in fields(ModelConfig)}
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        size = conversion.count(key)
        if size is not None and not 1 <= size <= (most[key] or size):
            raise ConfigError(f"{key} {size} is out of range: give 1 to {most[key]:,}")


def _with_extra_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings of `deepspeed_extra_args` to the others: NeoX passes both to DeepSpeed."""
    extra = settings.get("deepspeed_extra_args") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(f"deepspeed_extra_args {extra!r} is not a mapping: write it as {{...}}")
    for key in extra:
        if settings.get(key) is not None:
            raise ConfigError(f"{key} is in deepspeed_extra_args and outside: remove one")
    return {**{key: value for key, value in settings.items() if key != "deepspeed_extra_args"}, **extra}


def _check_the_rest(conversion: Conversion) -> None:
    """Refuse settings that differ from this trainer, remark those of operation, and end if any was refused."""
    parts = {"another-model": MODEL_CANNOT_BE_TRAINED, "another-training": TRAINING_CANNOT_BE_RUN}
    for part, end in parts.items():
        for key, (agreeing, reason) in table()[part].items():
            value = conversion.take(key)
            off = isinstance(value, Mapping) and not value.get("enabled", bool(value))
            if value is not None and value not in agreeing and not off:
                conversion.refuse(_with_value(key, value), reason, end)
    for key, value in conversion.settings.items():
        if key in conversion.taken or value is None:
            continue
        if key not in table()["operation"]:
            reason = "not a known setting of NeoX"
            conversion.refuse(_with_value(key, value), reason, "check how it is written")
        elif value is not False:  # A setting that is off needs no remark.
            conversion.remark(key, table()["operation"][key])
    conversion.check()


def _with_value(key: str, value: object) -> str:
    """Return a setting with its value, where that is short."""
    return f"{key} {value}" if isinstance(value, str | int | float) else key
