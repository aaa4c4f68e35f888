"""GPT-NeoX's settings, converted to flags of the trainer.

YAML files -> read_settings -> convert -> Conversion: the command, remarks on settings left out, or a refusal

`SETTINGS`, at the end, are rows of keys and flags, in the mechanism that reads a `config.json`
(`huggingface/families/settings.py`). `settings.toml` lists the keys without a counterpart. All defaults are NeoX's.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from pathlib import Path, PurePath
from typing import Any

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.options import flag, one_of
from megatron_terapipe.config.parsing import check_host_name, parse_yaml
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, TRAINING_CANNOT_BE_RUN, ConfigError
from megatron_terapipe.huggingface.families.settings import (
    COUNT,
    SWITCH,
    WORD,
    WORDS,
    Fields,
    Kind,
    Setting,
    SettingsFile,
    fixed,
    same,
    word,
)

SINCE_2023_12 = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "weight_decay": 0.1}
"""Defaults of NeoX that changed in December 2023."""

BEFORE_2023_12 = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "weight_decay": 0.01}
"""The same defaults until then, version 2.0 included."""

EXTRA = "deepspeed_extra_args"
SECTIONS = (EXTRA, "optimizer", "optimizer.params", "fp16", "bf16", "zero_optimization", "data_types")
"""Settings that hold others; the key of b in the section a is `a.b`."""

NUMBER_AS_TEXT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")
"""Numbers that YAML reads as text: 6e-4 has no point."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The command for settings, and the settings that it leaves out."""

    flags: list[list[str]]

    launch: list[list[str]]

    remarks: Mapping[str, str]
    """Reasons by settings that the command leaves out, or expresses in another way."""

    def words(self) -> list[str]:
        """Return the words after the name of the trainer."""
        return [word for flag in self.flags for word in flag]

    def command(self) -> str:
        """Return the command, a flag a line, as a shell reads it."""
        launch = " ".join(["terapipe train", *map(shlex.join, self.launch)])
        return " \\\n    ".join([launch, *map(shlex.join, self.flags)]) + "\n"

    def comments(self) -> Iterator[str]:
        """Yield the remarks, a line for each reason."""
        settings_by_reason = defaultdict(list)
        for setting, reason in self.remarks.items():
            settings_by_reason[reason].append(setting)
        for reason, settings in settings_by_reason.items():
            yield f"{', '.join(settings)}: {reason}"


def convert(
    settings: Mapping[str, Any], world_size: int | None = None, *, defaults: Mapping[str, float] = SINCE_2023_12
) -> Conversion:
    """Convert settings; raises a `ConfigError` that names all settings that cannot be converted.

    Args:
        world_size: processes of the run; None = as in the settings.
    """
    contents: dict[str, Any] = {}
    for key, value in _flat(settings):
        if key in contents:
            raise ConfigError(f"{key} is in deepspeed_extra_args and outside: remove one")
        contents[key] = value
    decay = contents.pop("optimizer.params.weight_decay", defaults["weight_decay"])
    processes = {} if world_size is None else {"global_num_gpus": world_size}
    file = SettingsFile({**defaults, "weight_decay": decay, **contents, **processes}, "the configuration")
    for kind in layer_kinds(contents.get("attention_config"), None):
        if kind in NOT_ATTENTION:  # Other settings mean something else in these models.
            raise file.refusal("attention_config", NOT_ATTENTION[kind], value=kind)
    known = {key for each in SETTINGS for key in each.keys}
    others = [_other(key) for key, value in contents.items() if key not in known and value is not False]
    fields: dict[str, Any] = {}
    refusals: list[str] = []
    for each in (*SETTINGS, *others):
        try:
            fields |= each.read(file, fields)
        except ConfigError as error:
            refusals.append(" ".join(str(error).split()))
    if refusals:
        raise ConfigError("; ".join(refusals))
    remarks = {name[1:]: fields.pop(name) for name in list(fields) if name.startswith("#")}
    launch = {name: fields.pop(name) for name in LAUNCH if name in fields}
    return Conversion(flags=list(_flags(fields)), launch=list(_flags(launch)), remarks=remarks)


def _flags(fields: Fields) -> Iterator[list[str]]:
    for name, value in fields.items():
        words = [] if value is True else [str(each) for each in (value if isinstance(value, list) else [value])]
        if words and words[0].startswith("-"):  # argparse takes such a word for a flag.
            yield [f"{flag(name)}={words[0]}"]
        elif value is not None and value is not False:
            yield [flag(name), *words]


def _flat(settings: Mapping[Any, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their whole keys, without nulls, which mean defaults, and sections that are off."""
    for name, value in settings.items():
        key = f"{section}.{name}" if section else str(name)
        if value is None or (key in BATCH and value == "auto"):
            continue
        if key in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} {value!r} is not a mapping: write it as {{...}}")
            # NeoX passes the extra settings to DeepSpeed, as it passes these sections.
            yield from _flat(value, "" if key == EXTRA else key)
        elif isinstance(value, str) and NUMBER_AS_TEXT.fullmatch(value):
            number = float(value)
            yield key, int(number) if number.is_integer() and number < 2**53 else number
        elif not isinstance(value, Mapping) or value.get("enabled", bool(value)):
            yield key, value


@cache
def without_counterpart(part: str) -> dict[str, str]:
    """Return the reasons of a part of `settings.toml` by key, or by `key=value`."""
    import tomllib

    table = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
    return {key: reason for reason, keys in table[part].items() for key in keys.split()}


def _other(key: str) -> Setting:
    """Return the setting of a key of no row: a remark, or a refusal if it may change the training."""
    section, _, name = key.rpartition(".")
    remark = without_counterpart("operation").get(key)
    if section == "zero_optimization":
        offloads = "offload" in name
        remark = (
            "states and weights stay on the accelerator" if offloads else "a file for --deepspeed-config can have it"
        )

    def read(file: SettingsFile, fields: Fields) -> Fields:
        if remark is not None:
            return {f"#{' '.join(key.split())}": remark}
        if section in ("fp16", "data_types"):
            raise file.refusal(key, "no flag decides it", "give it in a file for --deepspeed-config instead")
        raise file.refusal(key, "this is not a known setting of NeoX", "check how it is written")

    return Setting((key,), read)


def _refused(part: str, end: str) -> Iterator[Setting]:
    """Yield settings of which this trainer has one or a few values."""
    rows: dict[str, tuple[str, list[Any]]] = {}
    for entry, reason in without_counterpart(part).items():
        key, _, value = entry.partition("=")
        accepted = rows.setdefault(key, (reason, [None, False, 0]))[1]
        accepted.append(int(value) if value.isdigit() else value or False)
    for key, (reason, accepted) in rows.items():
        yield fixed(key, *accepted, reason=reason, end=end)


INTEGER = Kind("a whole number", lambda value: type(value) is int)
WHOLE = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 10**15)
AMOUNT = Kind("a number, 0 or more", lambda value: type(value) in (int, float) and 0 <= value < 1e36)
AMOUNTS = Kind("a list of numbers", lambda value: isinstance(value, list) and all(map(AMOUNT.fits, value)))
WHOLES = Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(WHOLE.fits, value)))
BETAS = Kind("two numbers such as [0.9, 0.95]", lambda value: AMOUNTS.fits(value) and len(value) == 2)
POWER = Kind("a whole number, 0 to 63", lambda value: type(value) is int and 0 <= value < 64)
PATHS = Kind("a path, or a list of paths", lambda value: isinstance(value, str) or WORDS.fits(value))
ANY = Kind("a value", lambda value: True)
KINDS: Mapping[type[Any], Kind] = {int: WHOLE, float: AMOUNT, bool: SWITCH, str: WORD}
"""Values that a setting may have, by the type of its default."""

Rule = Callable[[SettingsFile, Mapping[str, Any], Fields], Fields]
"""From the file, the settings that the rule reads, and the fields so far, to fields. `#key` is a remark on a key."""


def reads(**keys: Any) -> Callable[[Rule], Setting]:
    """Declare the settings that a rule reads.

    Args:
        keys: NeoX's default by key, or the kind of values of a key without a default.
    """
    declared = {
        key: (each, None) if isinstance(each, Kind) else (KINDS[type(each)], each) for key, each in keys.items()
    }

    def made(rule: Rule) -> Setting:
        def read(file: SettingsFile, fields: Fields) -> Fields:
            return rule(file, {key: file.value(key, *declared[key]) for key in declared}, fields)

        return Setting(tuple(declared), read)

    return made


def _at_most_one(neox: Mapping[str, Any], first: str, second: str, both: str) -> None:
    """Refuse two settings of which one may be given; `both` is the verb phrase about their purpose."""
    if None not in (neox[first], neox[second]):
        raise ConfigError(f"{first} {neox[first]} and {second} {neox[second]} both {both}: remove one")


@reads(rotary_pct=1.0, rotary_emb_base=10000)
def _rotations(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    rotated = fields.get("position_embedding_type") == "rope"
    return {"rotary_base": neox["rotary_emb_base"], "rotary_percent": neox["rotary_pct"]} if rotated else {}


EPSILONS = {"layernorm": ("layernorm_epsilon", 1e-5), "rmsnorm": ("rms_norm_epsilon", 1e-8)}
"""Setting of the epsilon by norm, and NeoX's default, which Transformer Engine's norm in the MLP always has."""


@reads(norm="layernorm", layernorm_epsilon=1e-5, rms_norm_epsilon=1e-8, use_bias_in_norms=True, te_layernorm_mlp=False)
def _norm(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    choices = [*EPSILONS, *(f"te_{name}" for name in EPSILONS)]
    ours = file.expect("norm", choices, "layernorm", "it can be layernorm or rmsnorm").removeprefix("te_")
    key, usual = EPSILONS[ours]
    if neox["te_layernorm_mlp"] and neox[key] != usual:
        raise file.refusal(key, f"with te_layernorm_mlp the MLP's norm has {usual}, and here all norms have the same")
    ours += "-no-bias" if ours == "layernorm" and not neox["use_bias_in_norms"] else ""
    return {"normalization": ours, "layernorm_epsilon": neox[key]}


NOT_ATTENTION = {
    "mamba": "Mamba 1 is not in this trainer, whose Mamba layers are Mamba 2",
    "rwkv": "RWKV layers are not in this trainer",
    "gmlp": "MLPs over positions are not in this trainer",
    "amlp": "MLPs over positions are not in this trainer",
}
"""Kinds of layers without attention, or with another, and the reason why they are refused."""

MOST_LAYERS = 10_000
"""Layers of a model at most, as in `--num-layers`."""


@reads(attention_config=ANY, sliding_window_width=WHOLE, te_mha=False)
def _attention(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    kinds, width = layer_kinds(neox["attention_config"], fields.get("num_layers")), neox["sliding_window_width"]
    for kind in kinds:
        if kind not in ("global", "flash"):
            raise file.refusal("attention_config", "attention is global", value=kind)
    with_window = [int(kind == "flash") for kind in kinds]
    if width is None:
        return {}
    if neox["te_mha"]:
        raise file.refusal("sliding_window_width", "Transformer Engine's window is two numbers", "leave te_mha out")
    if not any(with_window):
        return {"#sliding_window_width": "NeoX gives a window only to flash layers, and there are none"}
    layers = None if all(with_window) else str(with_window).replace(" ", "")
    # NeoX's window counts the tokens before a token.
    return {"sliding_window": width + 1, "window_attn_skip_freq": layers}


def layer_kinds(config: Any, num_layers: int | None) -> list[str]:
    """Return the kind of each layer from `[[["global", "flash"], 6]]`, or from a kind for each layer; None = global."""
    if config is None:
        return ["global"] * (num_layers or 1)
    kinds: list[str] = []
    try:
        for entry in config:
            pattern, times = ([entry], 1) if isinstance(entry, str) else entry
            times = (num_layers or len(pattern)) // len(pattern) if times == "all" else times
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

OF_ENGINE = ACTIVATIONS | {"gelu": "gelu", "geglu": "geglu"} | dict.fromkeys(("squared_relu", "srelu"), "squared-relu")
"""Activations of `te_layernorm_mlp`, whose GELU has the tanh form."""

GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
"""Activations that double the first matrix in NeoX, whether they are here or not."""


@reads(
    **{"activation": "gelu", "bias_gelu_fusion": False, "te_layernorm_mlp": False},
    **{"intermediate_size": WHOLE, "expansion_factor": AMOUNT, "mlp_multiple_of": 1},
)
def _mlp(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    _at_most_one(neox, "intermediate_size", "expansion_factor", "size the MLP")
    engine, hidden_size = neox["te_layernorm_mlp"], fields.get("hidden_size", 0)
    known = OF_ENGINE if engine else ACTIVATIONS
    name = file.expect("activation", known, "gelu", "it can be gelu, relu, swiglu or geglu")
    width = int((neox["expansion_factor"] or 0) * hidden_size) or neox["intermediate_size"] or 4 * hidden_size
    if name in GATED:
        # Two thirds of the width given, and half of that on each side; all of it in Transformer Engine's.
        width = int(width * 2 / 3) // (1 if engine else 2)
    multiple = (1 + engine) * (neox["mlp_multiple_of"] or 1)
    activation = "gelu" if name == "gelu" and neox["bias_gelu_fusion"] else known[name]
    return {"activation": activation, "ffn_hidden_size": -(-width // multiple) * multiple or None}


@reads(
    **{"moe_num_experts": 1, "moe_router_type": "sinkhorn", "activation": "gelu", "use_bias_in_mlp": True},
    **{"moe_expert_interval": 1, "moe_top_k": 1, "moe_jitter_eps": AMOUNT, "intermediate_size": WHOLE},
)
def _experts(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert experts, which have no gates and no biases, and are dealt to the ranks of `model_parallel_size`."""
    if neox["moe_num_experts"] <= 1:
        return {f"#{key}": "without effect in this model" for key in neox if key in file.contents and "moe_" in key}
    reason = "the choice of a token would depend on later tokens of the sequence, which are in later token slices"
    file.expect("moe_router_type", ("topk",), "sinkhorn", reason, TRAINING_CANNOT_BE_RUN)
    if neox["activation"] in GATED:
        raise file.refusal("activation", "experts of NeoX have no gates")
    if neox["moe_expert_interval"] > 1 and neox["use_bias_in_mlp"]:
        raise file.refusal("use_bias_in_mlp", "experts of NeoX have no biases, and here all MLPs are alike", value=True)
    ranks = fields.get("tensor_model_parallel_size", 1)
    found = {
        "num_experts": neox["moe_num_experts"],
        "moe_router_topk": neox["moe_top_k"],
        "moe_router_pre_softmax": True,  # The softmax is over all experts.
        "moe_layer_freq": neox["moe_expert_interval"],  # Layers are counted from 0.
        "moe_ffn_hidden_size": neox["intermediate_size"] or -(-4 * fields.get("hidden_size", 0) // 256) * 256,
        "moe_input_jitter_eps": neox["moe_jitter_eps"] or None,
    }
    if ranks > 1 and not fields.get("sequence_parallel"):
        found["#sequence_parallel"] = "with experts tensor-parallel ranks have tokens of their own"
    return found | ({"expert_model_parallel_size": ranks, "sequence_parallel": True} if ranks > 1 else {})


@reads(
    **{"use_bias_in_attn_linear": True, "use_bias_in_mlp": True, "te_mha": False, "te_layernorm_mlp": False},
    **{"gpt_j_residual": False, "gpt_j_tied": False, "hidden_dropout": 0.0},
)
def _biases(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert biases, how attention and MLP are added, and dropout."""
    # Transformer Engine's layers are always built with biases.
    attention, parallel = neox["use_bias_in_attn_linear"] or neox["te_mha"], neox["gpt_j_residual"]
    mlp = (neox["use_bias_in_mlp"] or neox["te_layernorm_mlp"]) and "num_experts" not in fields
    if neox["hidden_dropout"] and not (mlp and (attention or not parallel)):
        reason = "NeoX has no dropout where a matrix has no bias, and here dropout does not depend on biases"
        raise file.refusal("hidden_dropout", reason, "set it to 0")
    found = {
        "disable_bias_linear": not (attention and mlp),
        "add_attention_bias": attention and not mlp,
        "add_mlp_bias": mlp and not attention,
        "parallel_residual": parallel,
        "shared_block_norm": parallel and neox["gpt_j_tied"],
        "hidden_dropout": neox["hidden_dropout"],
    }
    lost = "attention and MLP add up in every layer; NeoX loses the attention of layers whose MLP has no biases"
    return found | ({"#gpt_j_residual": lost} if parallel and not mlp else {})


@reads(init_method_std=0.02, init_method="normal", output_layer_init_method="scaled_normal")
def _initial_weights(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the standard deviation of most initial weights, and of writers to the residual stream."""
    hidden_size, layers, std = fields.get("hidden_size", 1), fields.get("num_layers", 1), neox["init_method_std"]
    methods = {
        "normal": std,
        "scaled_normal": std / sqrt(2 * layers),
        # One residual a layer instead of two.
        "single_residual_scaled_normal": std / sqrt(layers),
        # Nguyen and Salazar, arXiv 1910.05895, section 2.2: Xavier's for a matrix of d x 4d.
        "small_init": sqrt(2 / (5 * hidden_size)),
        # GPT-J's, by its author Ben Wang.
        "wang_init": 2 / (layers * sqrt(hidden_size)),
    }
    reason = f"weights start from a normal distribution: it can be {one_of(list(methods))}"
    for key in ("init_method", "output_layer_init_method"):
        file.expect(key, methods, neox[key], reason, TRAINING_CANNOT_BE_RUN)
    if not {"hidden_size", "num_layers"} <= fields.keys():
        return {}
    first, last = methods[neox["init_method"]], methods[neox["output_layer_init_method"]]
    return {"init_method_std": first, "output_layer_init_std": last}


@reads(model_parallel_size=1, pipe_parallel_size=0, pipe_partition_method="type:transformer|mlp")
def _parallel(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the ranks that share layers, and the stages; 0 means 1."""
    tensor, stages, method = neox.values()
    found = {"tensor_model_parallel_size": max(1, tensor), "pipeline_model_parallel_size": max(1, stages)}
    if stages <= 1:
        return found
    if method != "parameters" and not method.startswith("type:transformer"):
        found["#pipe_partition_method"] = "stages get equally many transformer layers; see --stage-partition"
    return {**found, "stage_partition": "parameters" if method == "parameters" else "uniform"}


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@reads(**dict.fromkeys(BATCH, WHOLE), global_num_gpus=WHOLE, num_nodes=INTEGER, num_gpus=INTEGER)
def _batch(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the batch sizes. NeoX computes the global batch size from the others and the number of processes."""
    whole, micro, steps, processes, *hosts = neox.values()
    processes = processes or (prod(hosts) if None not in hosts and min(hosts) > 0 else 0)
    ranks = prod(fields.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
    if processes % ranks:
        raise ConfigError(
            f"{processes} processes are not a multiple of the {ranks} ranks of a model: change one of them"
        )
    replicas = processes // ranks
    if replicas:
        each = replicas * (steps or 1)
        micro = whole // each if micro is None and whole is not None else micro
        whole = micro * each if whole is None and micro is not None else whole
    sequences = (micro or 1) * (replicas or 1) * (steps or 1)
    if micro == 0 or (whole is not None and (whole % sequences or (replicas and steps and whole != sequences))):
        listed = ", ".join(f"{key} {neox[key]}" for key in BATCH if neox[key] is not None)
        among = f"{replicas} data-parallel ranks" if replicas else "each other"
        raise ConfigError(f"{listed} do not fit {among}: change one of them")
    if (micro is None) != (whole is None) and (micro is None or (steps or 1) > 1):
        key = BATCH[0] if micro is None else BATCH[2]
        raise ConfigError(f"{key} {neox[key]} depends on the number of processes: give it, --world-size N")
    return {"micro_batch_size": micro, "global_batch_size": whole}


@reads(
    **{"optimizer.type": "Adam", "optimizer.params.betas": BETAS, "optimizer.params.eps": 1e-8},
    **{"optimizer.params.momentum": 0.0, "optimizer.params.adam_w_mode": True, "optimizer.params.adamw_mode": True},
)
def _optimizer(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the optimizer, but for its learning rate."""
    kind, betas, epsilon, momentum, *decays_apart = neox.values()
    if fields["weight_decay"] and not all(decays_apart):
        reason = "Adam decays weights apart from the gradient"
        raise file.refusal("optimizer.params.adam_w_mode", reason, TRAINING_CANNOT_BE_RUN, value=False)
    if kind.lower() == "sgd":
        return {"optimizer": "sgd", "sgd_momentum": momentum}
    if kind.lower() not in ("adam", "adamw", "cpu_adam", "cpu_torch_adam"):
        raise file.refusal("optimizer.type", "it can be Adam or SGD", TRAINING_CANNOT_BE_RUN)
    remark = {"#optimizer.type": "the optimizer stays on the accelerator"} if kind.startswith("cpu") else {}
    first, second = betas or (0.9, 0.999)
    return {"optimizer": "adam", "adam_beta1": first, "adam_beta2": second, "adam_eps": epsilon, **remark}


@reads(
    **{"optimizer.params.lr": 0.001, "lr_decay_style": "linear", "min_lr": AMOUNT, "decay_lr_to": AMOUNT},
    **{"lr_decay_iters": WHOLE, "lr_decay_fraction": AMOUNT, "warmup": AMOUNT, "warmup_iters": WHOLE},
)
def _learning_rate(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert rise and decay. Files of Llemma give the rise in iterations, and the lowest rate as a share."""
    _at_most_one(neox, "min_lr", "decay_lr_to", "give the lowest rate")
    _at_most_one(neox, "lr_decay_iters", "lr_decay_fraction", "end the decay")
    _at_most_one(neox, "warmup", "warmup_iters", "set the length of the rise")
    highest, style, lowest, share, end, fraction, rise, rise_iterations = neox.values()
    styles, iterations = ("constant", "linear", "cosine"), fields.get("train_iters")
    file.expect("lr_decay_style", styles, "linear", f"it can be {one_of(styles)}", TRAINING_CANNOT_BE_RUN)
    lowest = float(lowest or 0.0) if share is None else share * highest
    end = int(fraction * iterations) if fraction is not None and iterations is not None else end
    last = end or iterations
    rise = rise_iterations / last if rise_iterations is not None and last else 0.01 if rise is None else rise
    found = {"lr": highest, "min_lr": lowest, "lr_decay_style": style}
    if style == "linear" and lowest and last is not None:
        end, rise, exact = cut_off(last, rise, highest=highest, lowest=lowest)
        if not exact:
            found["#lr_decay_style"] = f"min_lr is reached within half an iteration of where NeoX reaches it, at {end}"
    elif style == "cosine" and end is not None and iterations is not None and end < iterations:
        found["#lr_decay_iters"] = f"the rate stays at min_lr after {end}; NeoX's cosine rises again"
    return {**found, "lr_decay_iters": end, "lr_warmup_fraction": float(rise)}


def cut_off(last: int, warmup: float, *, highest: float, lowest: float) -> tuple[int, float, bool]:
    """Return the decay that equals NeoX's linear one, which aims at 0 and is cut off at `min_lr`.

    The values are the iteration at which the rate is `min_lr`, the iterations of the rise as a share of it, and whether
    the shape is NeoX's to the last digit. NeoX's rate falls from its peak at iteration W on a line to 0 at iteration E;
    it is the lowest rate at W + (E - W)(1 - lowest / highest), where the trainer's line ends.
    """
    rise = warmup * last
    reached = rise + (last - rise) * (1 - lowest / highest)
    end = max(1, round(reached))
    return end, rise / end, abs(end - reached) <= 1e-9 * last


@reads(
    **{"precision": "fp32", "bf16.enabled": False, "fp16.enabled": False, "fp16.type": "fp16"},
    **{"data_types.grad_accum_dtype": "", "zero_optimization.stage": 0, "fp16.loss_scale": 0.0},
    **{"fp16.initial_scale_power": POWER, "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2},
    **{"fp16.min_loss_scale": 1.0},
)
def _precision(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert number types, the scaling of the loss, and ZeRO's stage: all stages compute the same update."""
    given, brain, half, kind, accumulated, stage, scale, power, window, hysteresis, least = neox.values()
    brain = brain or (half and kind == "bfloat16")
    half = not brain and (half or given == "fp16")
    brain = brain or (not half and given in ("bfloat16", "bf16"))
    found: dict[str, Any] = {"bf16": brain, "zero_stage": min(1, stage)}
    if stage > 1:
        found["#zero_optimization.stage"] = "pipelines have ZeRO 1, which computes the same with more memory"
    elif (brain or half) and stage == 0:
        found |= {"zero_stage": 1, "#zero_optimization.stage": "fp16 and bf16 need ZeRO 1, which computes the same"}
    of_scaling = {
        "fp16": True,
        "accumulate_allreduce_grads_in_fp32": accumulated == "fp32",
        "loss_scale": scale or None,
        "initial_loss_scale": 2 ** (16 if power is None else power),
        **{"loss_scale_window": window, "hysteresis": hysteresis, "min_loss_scale": least},
    }
    return found | (of_scaling if half else {})


PARTS = ("train", "valid", "test")


@reads(
    **{"data_path": WORD, "split": "969, 30, 1", "tokenizer_type": "GPT2BPETokenizer", "vocab_file": WORD},
    **{"merge_file": WORD, **{f"{part}_data_paths": PATHS for part in PARTS}},
    **{f"{part}_data_weights": AMOUNTS for part in PARTS},
)
def _files(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the data and the tokenizer, whose file NeoX names `vocab_file`, whatever it is."""
    path, split, kind, vocabulary, merges, *_ = neox.values()
    known = ("GPT2BPETokenizer", "HFTokenizer", "SPMTokenizer")
    file.expect("tokenizer_type", known, kind, "it is not in this trainer", "tokenize the data with another")
    files = {"vocab_file": vocabulary, "merge_file": merges} if kind == known[0] else {"tokenizer_model": vocabulary}
    found = {"data_path": path, "split": split.replace(" ", "") if path is not None else None}
    for part in PARTS:
        paths, weights = neox[f"{part}_data_paths"] or [], neox[f"{part}_data_weights"]
        paths = [paths] if isinstance(paths, str) else paths
        weights = weights or [1.0] * len(paths)
        if len(weights) != len(paths):
            raise ConfigError(
                f"{part}_data_weights has {len(weights)} entries and {part}_data_paths {len(paths)}: give one for each"
            )
        pairs = [word for pair in zip(weights, paths, strict=True) for word in pair]
        found[f"{part}_data_path"] = (pairs if len(paths) > 1 else paths) or None
    return {**found, "tokenizer_type": kind, **files}


@reads(save=WORD, load=WORD, checkpoint_factor=WHOLE, extra_save_iters=WHOLES, keep_last_n_checkpoints=WHOLE)
def _checkpoints(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert the iterations of checkpoints, and the one that is loaded."""
    save, load, interval, extra, kept = neox.values()
    found = {"save": save, "load": load}
    if load is not None:
        of_others = "Hugging Face's format, to which NeoX's tools convert its own"
        found["#load"] = f"it takes checkpoints of this trainer, and in {of_others}"
    extra = sorted(set(extra or ())) or None
    when = {"save_interval": interval or None, "extra_save_iterations": extra, "keep_last_n_checkpoints": kept or None}
    return found | (when if save is not None else {})


@reads(
    **{"use_wandb": False, "wandb_project": "neox", "wandb_run_name": WORD},
    **{"profile": False, "profile_step_start": 10, "profile_step_stop": 12},
    **{"checkpoint_activations": False, "checkpoint_num_layers": 1},
)
def _switched(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    """Convert settings that count only where another is on."""
    wandb, project, run, profile, start, stop, recompute, layers = neox.values()
    return {
        **({"wandb_project": project, "wandb_exp_name": run} if wandb else {}),
        **({"profile": True, "profile_step_start": start, "profile_step_end": stop} if profile else {}),
        **({"recompute_granularity": "full", "recompute_num_layers": layers or 1} if recompute else {}),
    }


@reads(
    **{"hostfile": WORD, "master_addr": WORD, "comment": WORD, "launcher": WORD, "deepspeed_slurm": False},
    **{"deepspeed_mpi": False, "num_nodes": INTEGER, "num_gpus": INTEGER, "master_port": 29500},
)
def _launch(file: SettingsFile, neox: Mapping[str, Any], fields: Fields) -> Fields:
    hosts, first, comment, launcher, slurm, mpi, nodes, devices, port = neox.values()
    if first is not None:
        check_host_name(first, "master_addr")
    launcher = launcher or ("slurm" if slurm else "openmpi" if mpi else "pdsh")
    is_here = hosts is None or Path(hosts).is_file()
    missing = "it is not here, and DeepSpeed starts ranks on this machine then: add --hostfile for others"
    return {
        **({"hostfile": hosts} if is_here else {f"#hostfile {hosts}": missing}),
        "num_nodes": nodes if nodes != -1 else None,
        "num_accelerators": devices,
        "master_addr": first,
        "master_port": port if port != 29500 else None,
        "launcher": launcher if launcher != "pdsh" else None,
        # DeepSpeed splits this into words as a shell does: a comment of several must come out as one.
        "launcher_args": None if comment is None else shlex.quote(f"--comment={comment}"),
    }


LAUNCH = (
    *("hostfile", "include", "exclude", "num_nodes", "num_accelerators", "master_addr", "master_port", "launcher"),
    "launcher_args",
)

_ZERO = {"reduce_bucket_size": COUNT, "allgather_bucket_size": COUNT} | dict.fromkeys(
    ("reduce_scatter", "contiguous_gradients"), SWITCH
)
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}

SETTINGS = (
    *(same(key, key, COUNT, None) for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")),
    *(same(key, key, COUNT, None) for key in ("max_position_embeddings", "train_iters", "exit_interval")),
    same("make_vocab_size_divisible_by", "make_vocab_size_divisible_by", COUNT, 128),
    same("num_kv_heads", "num_key_value_heads", COUNT, None),
    *(same(key, key, WHOLE, usual) for key, usual in {"seed": 1234, "num_workers": 2, "log_interval": 100}.items()),
    *(same(key, key, WHOLE, usual) for key, usual in {"eval_interval": 1000, "eval_iters": 100}.items()),
    *(same(key, key, AMOUNT, None) for key in ("attention_dropout", "weight_decay")),
    same("gradient_clipping", "clip_grad", AMOUNT, 1.0),
    *(same(key, key, WORD, None) for key in ("distributed_backend", "tensorboard_dir", "include", "exclude")),
    *(same(key, key, SWITCH, False) for key in ("sequence_parallel", "mmap_warmup", "eod_mask_loss", "finetune")),
    *(same(key, key, SWITCH, False) for key in ("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")),
    same("no_weight_tying", "untie_embeddings_and_output_weights", SWITCH, False),
    same("log_param_norm", "log_params_norm", SWITCH, False),
    *(same(f"zero_optimization.{key}", f"zero_{key}", kind, None) for key, kind in _ZERO.items()),
    word("pos_emb", "position_embedding_type", POSITIONS, "learned"),
    *(_rotations, _norm, _attention, _mlp, _parallel, _experts, _biases, _initial_weights, _batch),
    *(_optimizer, _learning_rate, _precision, _files, _checkpoints, _switched, _launch),
    *_refused("another-model", MODEL_CANNOT_BE_TRAINED),
    *_refused("another-training", TRAINING_CANNOT_BE_RUN),
)
