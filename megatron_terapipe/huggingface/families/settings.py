"""Settings of a `config.json`, and the fields of the model section that mean the same.

First the file, whose values are checked as they are read; then the settings, each of one or a few keys.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import option_of
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that a setting may have."""

    values: str
    """These values in words."""
    fits: Callable[[Any], bool]


COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
NATURAL = Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
WHOLE = Kind("a whole number, -1 or more", lambda value: type(value) is int and value >= -1)
NUMBER = Kind(
    "a number above 0",
    lambda value: isinstance(value, int | float) and value is not True and isfinite(value) and value > 0,
)
NOT_NEGATIVE = Kind("a number, 0 or more", lambda value: (value == 0 and value is not False) or NUMBER.fits(value))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word", lambda value: isinstance(value, str))
WORDS = Kind("a list of words", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
BITS = Kind("a list of 0 and 1", lambda value: isinstance(value, list) and all(each in (0, 1) for each in value))
NUMBERS = Kind(
    "a list of numbers above 0", lambda value: isinstance(value, list) and bool(value) and all(map(NUMBER.fits, value))
)
NATURALS = Kind("a list of whole numbers", lambda value: isinstance(value, list) and all(map(NATURAL.fits, value)))
SECTION = Kind("a JSON object", lambda value: isinstance(value, Mapping))

_REQUIRED = object()


def refuse_experts(contents: Mapping[Any, Any], where: str, understood: Collection[str] = ()) -> None:
    """Raise a `ConfigError` if settings describe a mixture of experts, other than by keys that are understood."""
    for name, value in contents.items():
        if "expert" in str(name) and name not in understood and value not in (None, 0, 1, False):
            raise ConfigError(
                f"{where} sets {name} to {_shown(value)}, and experts are not in this type of model: "
                f"{MODEL_CANNOT_BE_TRAINED}"
            )


class SettingsFile:
    """The settings of a `config.json`, or of a section of it."""

    def __init__(self, contents: Mapping[str, Any], where: str, aliases: Mapping[str, str] | None = None) -> None:
        self.contents, self.where, self._aliases = contents, where, aliases or {}

    @classmethod
    def read(cls, path: str | Path, flag: str) -> "SettingsFile":
        """Read it; raise a `UserError` if that is impossible, or if it is not a JSON object."""
        file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
        # Files of Mamba-2 have infinite bounds.
        contents = read_json(str(file), flag, infinite=True)
        if not isinstance(contents, Mapping):
            raise ConfigError(f"{flag} {file} is not a JSON object: give the {CONFIG_FILE} of a model")
        return cls(contents, str(file))

    def value(self, name: str, kind: Kind, default: Any = _REQUIRED, *, nullable: bool = False) -> Any:
        """Return the value of a setting; raise a `ConfigError` if it is of another kind.

        Args:
            default: its value if it is missing; without one, it is required.
            nullable: whether it may be null, which is then returned.
        """
        name = self._spelled(name)
        if name not in self.contents and default is not _REQUIRED:
            return default
        value = self.contents.get(name)
        if (value is None and nullable) or (value is not None and kind.fits(value)):
            return value
        if name not in self.contents:
            raise ConfigError(f"{self.where} leaves out {name}, which must be {kind.values}: get the file again")
        raise ConfigError(
            f"{self.where} sets {name} to {_shown(value)}, and it must be {kind.values}: correct the file"
        )

    def expect(
        self,
        name: str,
        accepted: Iterable[Any],
        default: Any = None,
        reason: str = "",
        end: str = MODEL_CANNOT_BE_TRAINED,
    ) -> Any:
        """Return the value of a setting of which our models have one or a few values; raise a `ConfigError` for others.

        Args:
            default: its value if it is missing.
            reason: why others are refused; empty to list the accepted values.
        """
        name = self._spelled(name)
        value, accepted = self.contents.get(name, default), tuple(accepted)
        # In JSON, `true` is not 1.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            choices = " or ".join(_shown(each) for each in accepted)
            raise self.refusal(name, reason or f"our models have {choices}", end, value=value)
        return value

    def refusal(
        self, name: str, reason: str, end: str = MODEL_CANNOT_BE_TRAINED, *, value: object = None
    ) -> ConfigError:
        """Return the error about a setting without a counterpart here; `value` is its value, if not the file's."""
        shown = _shown(self.contents.get(name) if value is None else value)
        return ConfigError(f"{self.where} sets {name} to {shown}, and {reason}: {end}")

    def section(self, name: str) -> "SettingsFile":
        """Return a section of the file; an empty one if there is none."""
        contents = self.value(name, SECTION, None, nullable=True)
        return SettingsFile(contents or {}, f"{self.where} {name}")

    def with_value(self, name: str, value: Any) -> "SettingsFile":
        """Return the file with another value for a setting."""
        return SettingsFile({**self.contents, name: value}, self.where)

    def with_aliases(self, aliases: Mapping[str, str]) -> "SettingsFile":
        """Return the file with another name for some keys, by key; it counts where both are there."""
        return SettingsFile(self.contents, self.where, aliases)

    def _spelled(self, name: str) -> str:
        alias = self._aliases.get(name, name)
        return name if self.contents.get(alias) is None else alias

    def __bool__(self) -> bool:
        return bool(self.contents)


def _shown(value: object) -> str:
    """Return a value as the file writes it, cut to a length that fits into a line."""
    text = json.dumps(value, ensure_ascii=False, default=lambda other: "an object")
    return text if len(text) <= 60 else f"{text[:57]}..."


Fields = Mapping[str, Any]
"""Fields of the model section by name, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Some keys of `config.json`, and the fields of the model section that mean the same."""

    keys: tuple[str, ...]
    read: Callable[[SettingsFile, Fields], Fields]
    """From a file, and the fields that the settings before have read, to fields. Raises a `ConfigError` for values that
    our models cannot have."""
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda model: {}
    """From a model to the keys, the nearest that the family has to it: `Family.differences` reads them again."""


_FIELDS = {each.name: each for each in fields(ModelConfig)}


def _within_bounds(kind: Kind, field: str) -> Kind:
    """Return the values of a kind that a field of the model section accepts: layers are listed before it is built."""
    most = option_of(_FIELDS[field]).most if field in _FIELDS else None
    if most is None:
        return kind
    return Kind(f"{kind.values}, {most:,} at most", lambda value: kind.fits(value) and value <= most)


def same(key: str, field: str, kind: Kind, default: Any, *, nullable: bool = False) -> Setting:
    """Return a key with the value of a field. A null, if allowed, leaves the field at its default.

    Args:
        default: its value if it is missing; None: the default of the field.
    """
    kind, number = _within_bounds(kind, field), kind is NUMBER

    def read(file: SettingsFile, fields: Fields) -> Fields:
        value = file.value(key, kind, default, nullable=nullable or default is None)
        return {} if value is None else {field: float(value) if number else value}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        value = getattr(model, field)
        return {key: value} if value is not None or nullable or default is None else {}

    return Setting((key,), read, write)


def opposite(key: str, field: str, default: bool) -> Setting:
    """Return a switch that is on where a field is off."""
    return Setting(
        (key,),
        lambda file, fields: {field: not file.value(key, SWITCH, default)},
        lambda model: {key: not getattr(model, field)},
    )


def power(key: str, field: str, exponent: float, default: float, *, whole: bool = False) -> Setting:
    """Return a number of which a power is the field, such as the divisor to our factor.

    Args:
        whole: whether transformers reads only whole numbers; the nearest is written.
    """

    def write(model: ModelConfig) -> Mapping[str, Any]:
        value = getattr(model, field) ** (1 / exponent)
        # A whole number if it is one but for rounding.
        nearest = max(1, round(value))
        return {key: nearest if whole or abs(value - nearest) <= 1e-9 * value else value}

    # Powers of the least number do not overflow.
    return Setting(
        (key,), lambda file, fields: {field: max(file.value(key, NUMBER, default), 1e-300) ** exponent}, write
    )


def word(key: str, field: str, words: Mapping[Any, str], default: str | bool) -> Setting:
    """Return a key with words, or true and false, of its own.

    Args:
        words: our words by theirs.
        default: their word if it is missing, and the one that is written if several have one meaning.
    """

    def write(model: ModelConfig) -> Mapping[str, Any]:
        ours = getattr(model, field)
        return {key: next((theirs for theirs in (default, *words) if words[theirs] == ours), default)}

    return Setting((key,), lambda file, fields: {field: words[file.expect(key, words, default)]}, write)


def fixed(key: str, *accepted: Any, reason: str = "", end: str = MODEL_CANNOT_BE_TRAINED) -> Setting:
    """Return a key of which our models have a single meaning.

    Args:
        accepted: values with that meaning; the first is its value if it is missing.
        reason: why others are refused; empty to list the accepted values.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        file.expect(key, accepted, accepted[0], reason, end)
        return {}

    return Setting((key,), read)


def always(**constants: Any) -> Setting:
    """Return fields that are the same in every model of a family."""
    return Setting((), lambda file, fields: constants)


def written(**fields: str) -> Setting:
    """Return keys about training, with their fields. They are written and not read: training is a matter of flags."""
    return Setting(
        tuple(fields),
        lambda file, before: {},
        lambda model: {key: getattr(model, name) for key, name in fields.items()},
    )


def ignored(*keys: str) -> Setting:
    """Return keys that change no result, and are neither read nor written."""
    return Setting(keys, lambda file, fields: {})


def biases(
    qkv: bool | str = False, projection: bool | str = False, mlp: bool | str = False, *, default: bool | str = False
) -> Setting:
    """Return the setting of the biases of queries, keys and values, of the projection after attention, and of the MLP.

    Each is a constant or a key.

    Args:
        default: value of a missing key; or the only key that is true if it is missing.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        of_qkv, of_projection, of_mlp = (
            each if isinstance(each, bool) else bool(file.value(each, SWITCH, default in (True, each)))
            for each in (qkv, projection, mlp)
        )
        if of_projection and not of_qkv:
            raise ConfigError(
                f"{file.where} has {projection} without {qkv}, and in our models a bias after attention comes with "
                "biases of queries, keys and values: this model cannot be trained here"
            )
        if of_qkv and of_projection and of_mlp:
            return {"disable_bias_linear": False}
        return {
            "disable_bias_linear": True,
            "add_qkv_bias": of_qkv and not of_projection,
            "add_attention_bias": of_qkv and of_projection,
            "add_mlp_bias": of_mlp,
        }

    def write(model: ModelConfig) -> Mapping[str, Any]:
        pairs = ((qkv, model.has_qkv_bias), (projection, model.has_projection_bias), (mlp, model.has_mlp_bias))
        return {key: has for key, has in pairs if isinstance(key, str)}

    keys = dict.fromkeys(each for each in (qkv, projection, mlp) if isinstance(each, str))
    return Setting(tuple(keys), read, write)


ATTENTION_BIASES = biases(qkv="attention_bias", projection="attention_bias")
"""Biases of all products of attention by one key, and none in the MLP."""

GATED: Mapping[str, str] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
    "gelu": "geglu-exact",
}
"""Our activation functions of gated MLPs, by their names of the function before the gate."""

UNGATED: Mapping[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu-exact",
    "relu": "relu",
    "relu2": "squared-relu",
}
"""Our activation functions of MLPs without a gate, by their names there."""


def sizes(
    defaults: Sequence[int | float | None], renamed: Mapping[str, str] | None = None, *, tied: bool = False
) -> tuple[Setting, ...]:
    """Return the settings of the sizes that every family has.

    Args:
        defaults: values of missing keys, in the order of the table below.
        renamed: keys by most families' keys, where they differ.
    """
    usual = (
        ("vocab_size", "vocab_size", COUNT),
        ("max_position_embeddings", "max_position_embeddings", COUNT),
        ("hidden_size", "hidden_size", COUNT),
        ("intermediate_size", "ffn_hidden_size", COUNT),
        ("num_hidden_layers", "num_layers", COUNT),
        ("num_attention_heads", "num_attention_heads", COUNT),
        ("initializer_range", "init_method_std", NUMBER),
    )
    return (
        *(
            same((renamed or {}).get(key, key), field, kind, default)
            for (key, field, kind), default in zip(usual, defaults, strict=True)
        ),
        opposite("tie_word_embeddings", "untie_embeddings_and_output_weights", tied),
    )


def heads_of_keys(default: int | None) -> Setting:
    """Return the setting of key and value heads; null for as many as query heads."""
    return same("num_key_value_heads", "num_key_value_heads", COUNT, default, nullable=True)


def head_width(default: int | None = None) -> Setting:
    """Return the setting of the width of a head; None for hidden size over heads."""
    return same("head_dim", "kv_channels", COUNT, default)
