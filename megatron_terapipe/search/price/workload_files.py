"""Models from files, or by the name of a preset: a GPT by its fields, or any model layer by layer."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import Field, create_model, model_validator

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import field_texts, read_text
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parsing import short
from megatron_terapipe.config.presets import MODEL_PRESETS, find_preset
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.registry import FAMILIES, family_named, is_model_folder
from megatron_terapipe.huggingface.families.settings import CONFIG_FILE, WORD, SettingsFile, refuse_experts
from megatron_terapipe.search.machine.documents import parse_text, suggestion
from megatron_terapipe.search.machine.entries import MOST, Count, CountOrNone, Entry, Text, fault, place, read_entry
from megatron_terapipe.search.price.workload import (
    IMBALANCE,
    Attention,
    Layer,
    LayerKind,
    Parallel,
    Product,
    Workload,
    gpt_workload,
)

__all__ = ["parse_workload", "read_workload"]

MOST_LAYERS = 10_000
"""Most layers of a model; more would be a mistake in the file."""


class ProductEntry(Entry):
    """A matrix product."""

    inputs: Count
    outputs: Count
    parallel: Parallel = "none"


class AttentionEntry(Entry):
    """An attention; the default number of key and value heads is the number of query heads."""

    query_heads: Count
    key_value_heads: Count | None = None
    head_size: Count
    causal: bool = True
    separate_window: Count | None = None
    sliding_window: Count | None = None
    normed: bool = False
    written_out: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "AttentionEntry":
        if self.sliding_window and not self.causal:
            raise ValueError(
                f"has sliding_window {self.sliding_window}, which reaches back from a token, and is not causal: give "
                "causal true, or separate_window for windows that are not causal"
            )
        if self.separate_window and self.causal:
            raise ValueError(
                f"has separate_window {self.separate_window}, which is not causal, and is causal: give "
                "causal false, or sliding_window for the tokens up to a token"
            )
        if self.key_value_heads and self.query_heads % self.key_value_heads:
            raise ValueError(
                f"has key_value_heads {self.key_value_heads}, which does not divide query_heads {self.query_heads}: "
                "give one of its divisors"
            )
        return self


class LayerEntry(Entry):
    """A layer, or `repeat` equal ones in a row; by default its parameters are in its products."""

    repeat: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 1
    name: Text | None = None
    kind: LayerKind = "block"
    tokens: Count
    hidden_size: Count
    products: list[ProductEntry] = Field(default_factory=list, min_length=1)
    attention: AttentionEntry | None = None
    parameters: CountOrNone | None = None
    unshared_parameters: CountOrNone = 0
    num_norms: CountOrNone = 0
    activation_width: CountOrNone = 0
    gated: bool = False
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    num_biases: CountOrNone = 0
    biased_channels: CountOrNone = 0
    rotary_channels: CountOrNone = 0
    shared_weight: Text | None = None
    shared_parameters: CountOrNone = 0
    extra_output_elements: CountOrNone = 0

    def layer(self, where: str) -> Layer:
        """Return the layer; `where` is the place of the entry, for errors."""
        products = tuple(Product(**dict(each)) for each in self.products)
        attention = None
        if (given := self.attention) is not None:
            attention = Attention(**dict(given) | {"key_value_heads": given.key_value_heads or given.query_heads})
        weights = sum(product.weights for product in products)
        parameters = weights if self.parameters is None else self.parameters
        for name in ("unshared_parameters", "shared_parameters"):
            if getattr(self, name) > parameters:
                problem = f"is more than the layer's {parameters} parameters"
                raise fault(f"{where}.{name}", getattr(self, name), problem, "correct one of them")
        if attention is not None and attention.separate_window is not None and self.tokens % attention.separate_window:
            problem = f"does not divide the layer's {self.tokens} tokens"
            raise fault(f"{where}.attention.separate_window", attention.separate_window, problem, "change one of them")
        values = dict(self) | {"products": products, "attention": attention, "parameters": parameters}
        del values["repeat"]
        return Layer(**values | {"name": self.name or self.kind})


class LayeredEntry(Entry):
    """A model layer by layer."""

    name: Text | None = None
    source: Text | None = None  # for readers of the file
    seq_length: Count
    layers: list[LayerEntry] = Field(min_length=1)
    first_dealt_layer: CountOrNone = 0
    end_dealt_layer: Count | None = None


def _gpt_entry() -> type[Entry]:
    """The fields of the trainer's model section, none of them required, and the name of a preset for the rest."""
    limits = {int: Field(None, ge=-MOST, le=MOST), float: Field(None, ge=-MOST, le=MOST)}
    fields_of: dict[str, Any] = {"name": (str | None, None), "preset": (str | None, None)}
    for name, hint in get_type_hints(ModelConfig).items():
        kind = next((each for each in (bool, int, float) if each in (hint, *get_args(hint))), str)
        fields_of[name] = (kind | None, limits.get(kind))
    fields_of["num_layers"] = (int | None, Field(None, le=MOST_LAYERS))
    return create_model("GptEntry", __base__=Entry, **fields_of)


GptEntry = _gpt_entry()


def model_schema() -> dict[str, Any]:
    """Return the JSON Schema of a model file with the fields of the model section and their descriptions."""
    schema = GptEntry.model_json_schema()
    for name, text in field_texts(ModelConfig).items():
        schema["properties"][name]["description"] = text
    return schema


DEFAULT_VOCAB_SIZE = 50257
"""GPT-2's, which published measurements that name none used."""


OF_ANY_SIZE = frozenset({"vocab_size", "seq_length", "max_position_embeddings"})
"""Fields that may be other than a preset's without making another model of it."""


def read_workload(path_or_preset: str, changes: Mapping[str, Any] | None = None) -> Workload:
    """Read a model: a JSON or YAML file, a `config.json` of Hugging Face or its folder, or the name of a preset.

    `changes` replace fields of the file or the preset.
    """
    if is_model_folder(path_or_preset):
        return read_workload(str(Path(path_or_preset) / CONFIG_FILE), changes)
    if Path(path_or_preset).is_dir():
        raise ConfigError(
            f"model {path_or_preset} is a folder without {CONFIG_FILE}: give a file, or the name of a preset"
        )
    if not Path(path_or_preset).exists():
        if path_or_preset in MODEL_PRESETS:
            return parse_workload({"preset": path_or_preset}, f"preset {path_or_preset}", changes)
        if "/" not in path_or_preset and "." not in Path(path_or_preset).name:
            remedy = _nearest_preset(path_or_preset)
            raise ConfigError(f"model {path_or_preset} is neither a file nor a preset: {remedy}")
        if not Path(path_or_preset).suffix[1:].isalpha():
            raise ConfigError(
                f"model {path_or_preset} is not a local file, and models are not downloaded: download its "
                f"{CONFIG_FILE} and give the path"
            )
    return parse_workload(parse_text(read_text(path_or_preset), path_or_preset), path_or_preset, changes)


def parse_workload(
    document: object, where: str, changes: Mapping[str, Any] | None = None, *, imbalance: float = IMBALANCE
) -> Workload:
    """Read a model from the object of a file.

    It has fields of the trainer's model section, with `preset` for the rest of them; or `layers`; or fields of Hugging
    Face, with `model_type`. `imbalance`: see `Experts`.
    """
    if isinstance(document, Mapping) and "layers" in document:
        if changes:
            raise ConfigError(
                f"{where} lists layers, which flags do not change: drop --{next(iter(changes)).replace('_', '-')}"
            )
        return _layered(read_entry(LayeredEntry, document, where), where)
    if isinstance(document, Mapping) and "model_type" in document:
        file = SettingsFile(document, where)
        family = family_named(file.value("model_type", WORD), where)
        family.read(file)
        found = family.fields(file)
        given = {"name": family.name, "seq_length": found["max_position_embeddings"], **found}
    else:
        _refuse_other_models(document, where)
        given = read_entry(GptEntry, document, where).model_dump(exclude_none=True)
    values = {**given, **{name: value for name, value in (changes or {}).items() if value is not None}}
    name, preset = values.pop("name", ""), values.pop("preset", None) or values.pop("model_preset", None)
    if preset is not None and preset not in MODEL_PRESETS:
        raise ConfigError(f"{place(where, 'preset')} {short(preset)} is not known: {_nearest_preset(preset)}")
    settings = {"vocab_size": DEFAULT_VOCAB_SIZE, **({} if preset is None else find_preset(preset).settings), **values}
    missing = [each.name for each in fields(ModelConfig) if each.default is MISSING and each.name not in settings]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given: add {'it' if len(missing) == 1 else 'them'}")
    try:
        model = ModelConfig(**settings)
    except UserError as error:
        # Fields of a file in place of flags.
        words = re.sub(r"--([a-z][\w-]+)", lambda flag: flag[1].replace("-", "_"), str(error))
        raise ConfigError(f"{where}: {words}") from None
    named = name or (preset if preset and values.keys() <= OF_ANY_SIZE else "")
    return gpt_workload(model, named, imbalance=imbalance)


def _refuse_other_models(document: object, where: str) -> None:
    """Raise if the fields describe a model that the trainer does not have, rather than misspelt ones of its own."""
    if not isinstance(document, Mapping):
        return
    refuse_experts({name: value for name, value in document.items() if name not in GptEntry.model_fields}, where)
    if "architectures" in document:
        raise ConfigError(
            f"{where} is a {CONFIG_FILE} of {short(document['architectures'])} without model_type, which names its "
            f"family: add model_type, one of {', '.join(FAMILIES)}"
        )


def _layered(given: LayeredEntry, where: str) -> Workload:
    layers: list[Layer] = []
    total = sum(entry.repeat for entry in given.layers)
    if total > MOST_LAYERS:
        raise ConfigError(f"{place(where, 'layers')}: {total} layers are more than {MOST_LAYERS:,}: repeat fewer")
    for index, entry in enumerate(given.layers):
        layers += [entry.layer(place(where, "layers", index))] * entry.repeat
    shared: dict[str | None, int] = {}
    for layer in layers:
        entries = shared.setdefault(layer.shared_weight, layer.shared_parameters)
        if layer.shared_weight is not None and entries != layer.shared_parameters:
            raise ConfigError(
                f"{place(where, 'layers')}: shared weight {layer.shared_weight!r} has {entries} entries in one "
                f"layer and {layer.shared_parameters} in another: make shared_parameters agree"
            )
    first, end = given.first_dealt_layer, given.end_dealt_layer or len(layers)
    if not first < end <= len(layers):
        problem = f"is not in {first + 1} to {len(layers)}"
        raise fault(place(where, "end_dealt_layer"), end, problem, "count layers from 0")
    return Workload(
        name=given.name or where.rpartition("/")[2].rpartition(".")[0],
        layers=tuple(layers),
        seq_length=given.seq_length,
        first_dealt=first,
        end_dealt=end,
    )


def _nearest_preset(name: str) -> str:
    remedy = suggestion(name, MODEL_PRESETS)
    return remedy if remedy.startswith("did you mean") else f"give a JSON file, or one of {', '.join(MODEL_PRESETS)}"
