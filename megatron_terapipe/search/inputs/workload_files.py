"""Models from files, or by the name of a preset: a GPT by its fields, or any model layer by layer."""

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args, get_origin, get_type_hints

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.presets import MODEL_PRESETS, find_preset
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.documents import MOST, Fields, parse_text, short, suggestion
from megatron_terapipe.search.inputs.gpt_workload import gpt_workload
from megatron_terapipe.search.inputs.layer import Attention, Layer, LayerKind, Parallel, Product
from megatron_terapipe.search.inputs.workload import Workload

MOST_LAYERS = 10_000
"""Of a model: more would be a slip of the hand."""


def read_layers(model: Fields) -> tuple[Layer, ...]:
    """Read the layers of a model, first to last.

    Each entry has `tokens` and `hidden_size`, and what else the layer has: `kind`, `name`, `repeat` (equal layers one
    after the other), `products`, `attention`, `parameters`, `unshared_parameters`, `num_norms`, `activation_width`,
    `gated`, `shared_weight`, `shared_parameters`, `extra_output_elements`, `forward_s`.

    Args:
        model: the object with the list `layers`.

    Raises:
        ConfigError: if a field is wrong.
    """
    layers: list[Layer] = []
    for entry in model.sections("layers"):
        repeat = entry.whole("repeat", 1, most=MOST_LAYERS)
        layer = _read_layer(entry)
        entry.finish()
        layers += [layer] * repeat
    shared: dict[str, int] = {}
    for layer in layers:
        if layer.shared_weight is not None:
            entries = shared.setdefault(layer.shared_weight, layer.shared_parameters)
            if entries != layer.shared_parameters:
                raise ConfigError(
                    f"{model.place('layers')}: shared weight {layer.shared_weight!r} has {entries} entries in one "
                    f"layer and {layer.shared_parameters} in another: make shared_parameters agree"
                )
    return tuple(layers)


def _read_layer(entry: Fields) -> Layer:
    kind = entry.choice("kind", get_args(LayerKind), "block")
    products = tuple(_read_product(each) for each in entry.sections("products")) if entry.has("products") else ()
    attention = _read_attention(entry.section("attention")) if entry.has("attention") else None
    weights = sum(product.weights for product in products)
    parameters = entry.whole("parameters", weights, least=0)
    layer = Layer(
        name=entry.text("name", kind),
        kind=cast(LayerKind, kind),
        tokens=entry.whole("tokens"),
        hidden_size=entry.whole("hidden_size"),
        parameters=parameters,
        unshared_parameters=entry.whole("unshared_parameters", 0, least=0),
        products=products,
        attention=attention,
        num_norms=entry.whole("num_norms", 0, least=0),
        activation_width=entry.whole("activation_width", 0, least=0),
        gated=entry.flag("gated", False),
        shared_weight=entry.text("shared_weight") if entry.has("shared_weight") else None,
        shared_parameters=entry.whole("shared_parameters", 0, least=0),
        extra_output_elements=entry.whole("extra_output_elements", 0, least=0),
        forward_s=_read_forward(entry) if entry.has("forward_s") else None,
    )
    for name in ("unshared_parameters", "shared_parameters"):
        if getattr(layer, name) > parameters:
            raise entry.fault(name, f"is more than the layer's {parameters} parameters", "correct one of them")
    if attention is not None and attention.window is not None and layer.tokens % attention.window:
        raise ConfigError(
            f"{entry.place('attention.window')} {attention.window} does not divide the layer's {layer.tokens} tokens: "
            "change one of them"
        )
    return layer


def _read_product(entry: Fields) -> Product:
    product = Product(
        entry.whole("inputs"),
        entry.whole("outputs"),
        cast(Parallel, entry.choice("parallel", get_args(Parallel), "none")),
    )
    entry.finish()
    return product


def _read_attention(entry: Fields) -> Attention:
    query_heads = entry.whole("query_heads")
    attention = Attention(
        query_heads,
        entry.whole("key_value_heads", query_heads),
        entry.whole("head_size"),
        causal=entry.flag("causal", True),
        window=entry.whole("window") if entry.has("window") else None,
    )
    if query_heads % attention.key_value_heads:
        raise entry.fault("key_value_heads", f"does not divide query_heads {query_heads}", "give one of its divisors")
    entry.finish()
    return attention


def _read_forward(entry: Fields) -> Mapping[int, float]:
    """Seconds of one sequence by tensor-parallel size; a single number is that without tensor parallelism."""
    value = entry.raw("forward_s")
    by_size = value if isinstance(value, Mapping) else {1: value}
    costs: dict[int, float] = {}
    for size, seconds in by_size.items():
        whole = int(size) if str(size).isdecimal() else 0
        good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if whole < 1 or not good or seconds < 0:
            raise ConfigError(
                f"{entry.place('forward_s')} {short(value)} is not seconds by tensor-parallel size: "
                'write it as {"1": 0.004, "2": 0.003}'
            )
        costs[whole] = float(seconds)
    if not costs:
        raise entry.fault("forward_s", "says nothing", 'write it as {"1": 0.004}, or drop it')
    return MappingProxyType(costs)


DEFAULT_VOCAB_SIZE = 50257
"""GPT-2's, which published measurements that name none used."""


OF_ANY_SIZE = frozenset({"vocab_size", "seq_length", "max_position_embeddings"})
"""Fields that may be other than a preset's without making another model of it."""


def read_workload(path_or_preset: str, changes: Mapping[str, Any] | None = None) -> Workload:
    """Read a model.

    Args:
        path_or_preset: a JSON or YAML file, or the name of a preset, such as `gpt3-13b`.
        changes: fields of the model section that are other than the file or the preset says.

    Raises:
        ConfigError: if there is no such file or preset, or a field is wrong; it names file, field and remedy.
    """
    if path_or_preset in MODEL_PRESETS and not Path(path_or_preset).exists():
        return parse_workload({"preset": path_or_preset}, f"preset {path_or_preset}", changes)
    if not Path(path_or_preset).exists() and "/" not in path_or_preset and "." not in Path(path_or_preset).name:
        raise ConfigError(f"model {path_or_preset} is neither a file nor a preset: {_nearest_preset(path_or_preset)}")
    return parse_workload(parse_text(read_text(path_or_preset), path_or_preset), path_or_preset, changes)


def parse_workload(document: object, where: str, changes: Mapping[str, Any] | None = None) -> Workload:
    """Read a model from the object of a file.

    Args:
        document: fields of the trainer's model section, with `preset` for the rest of them; or `layers`.
        where: what the object came from, for errors.
        changes: fields that are other than the document says.

    Raises:
        ConfigError: if a field is wrong.
    """
    given = Fields(document, where)
    if "layers" in given.values:
        if changes:
            raise ConfigError(f"{where} lists layers, which flags do not change: drop --{_dashed(next(iter(changes)))}")
        return _layered(given)
    values = {**given.values, **(changes or {})}
    name = values.pop("name", None) or ""
    if not isinstance(name, str):
        raise given.fault("name", "is not a text", "give one")
    preset = values.pop("preset", None) or values.pop("model_preset", None)
    settings = {} if preset is None else dict(_preset(preset, given))
    for field, value in values.items():
        _check_field(field, value, given)
        if value is not None:
            settings[field] = value
    settings.setdefault("vocab_size", DEFAULT_VOCAB_SIZE)
    missing = [each.name for each in fields(ModelConfig) if each.default is MISSING and each.name not in settings]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given: add {'it' if len(missing) == 1 else 'them'}")
    try:
        model = ModelConfig(**settings)
    except UserError as error:
        raise ConfigError(f"{where}: {_as_fields(str(error))}") from None
    return gpt_workload(model, name or (preset if preset and values.keys() <= OF_ANY_SIZE else ""))


def _layered(given: Fields) -> Workload:
    given.text("source", "")  # for readers of the file
    layers = read_layers(given)
    first = given.whole("first_dealt_layer", 0, least=0)
    end = given.whole("end_dealt_layer", len(layers), least=1)
    if not first < end <= len(layers):
        raise given.fault("end_dealt_layer", f"is not in {first + 1} to {len(layers)}", "count layers from 0")
    workload = Workload(
        name=given.text("name", given.file.rpartition("/")[2].rpartition(".")[0]),
        layers=layers,
        seq_length=given.whole("seq_length"),
        first_dealt=first,
        end_dealt=end,
    )
    given.finish()
    return workload


def _preset(name: object, given: Fields) -> Mapping[str, Any]:
    if not isinstance(name, str) or name not in MODEL_PRESETS:
        raise ConfigError(f"{given.place('preset')} {short(name)} is not known: {_nearest_preset(str(name))}")
    return find_preset(name).settings


def _nearest_preset(name: str) -> str:
    remedy = suggestion(name, MODEL_PRESETS)
    return remedy if remedy.startswith("did you mean") else f"give a JSON file, or one of {', '.join(MODEL_PRESETS)}"


def _check_field(name: str, value: object, given: Fields) -> None:
    """Refuse fields that are not known, and values that are not of their types."""
    hints = get_type_hints(ModelConfig)
    if name not in hints:
        known = [each for each in hints if each != "model_preset"]
        raise ConfigError(
            f"{given.place(name)} {short(value)} is not a known field: {suggestion(name, ['preset', *known])}"
        )
    if value is None:
        return
    kind = hints[name]
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    parts = [each for each in (get_args(kind) if get_origin(kind) not in (None,) else (kind,))]
    wanted = next((each for each in kinds if each in parts), str)
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{given.place(name)} {short(value)} is not {kinds[wanted]}: give one")
    most = MOST_LAYERS if name == "num_layers" else MOST
    # Not finite, as 1e400 reads, or beyond counting.
    if isinstance(value, int | float) and not -most <= value <= most:
        raise ConfigError(f"{given.place(name)} {short(value)} is more than {most:,}: give less")


def _as_fields(message: str) -> str:
    """A message of the model section, which speaks of flags, in the words of a file."""
    return re.sub(r"--([a-z][\w-]+)", lambda flag: flag[1].replace("-", "_"), message)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
