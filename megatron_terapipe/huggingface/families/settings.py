"""Settings of a `config.json`, and the fields of the model section that mean the same.

First the file, whose values are checked as they are read; then the settings, each of one or a few keys.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import MODEL_CANNOT_BE_TRAINED, ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that a setting may have."""

    wanted: str
    """What they are, in words."""
    fits: Callable[[Any], bool]
    """Whether a value is one of them."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
NATURAL = Kind("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word", lambda value: isinstance(value, str))
WORDS = Kind("a list of words", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
BITS = Kind("a list of 0 and 1", lambda value: isinstance(value, list) and all(each in (0, 1) for each in value))
NUMBERS = Kind(
    "a list of numbers above 0", lambda value: isinstance(value, list) and value and all(map(NUMBER.fits, value))
)
SECTION = Kind("a JSON object", lambda value: isinstance(value, Mapping))

_REQUIRED = object()


def refuse_experts(contents: Mapping[Any, Any], where: str) -> None:
    """Raise if settings describe a mixture of experts, whatever else they say.

    Raises:
        ConfigError: naming the first setting of experts that does not say that there are none.
    """
    for name, value in contents.items():
        if "expert" in str(name) and value not in (None, 0, 1):
            raise ConfigError(
                f"{where} sets {name} to {_shown(value)}, and mixtures of experts are not in this trainer: "
                f"{MODEL_CANNOT_BE_TRAINED}"
            )


class SettingsFile:
    """The settings of a `config.json`, or of a section of it."""

    def __init__(self, contents: Mapping[str, Any], where: str) -> None:
        self._contents, self.where = contents, where

    @classmethod
    def read(cls, path: str | Path, flag: str) -> "SettingsFile":
        """Read it.

        Raises:
            UserError: if it cannot be read, or is no JSON object.
        """
        file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
        contents = read_json(str(file), flag)
        if not isinstance(contents, Mapping):
            raise ConfigError(f"{flag} {file} is not a JSON object: give the {CONFIG_FILE} of a model")
        return cls(contents, str(file))

    def has(self, name: str) -> bool:
        """Whether a setting is there, and not null."""
        return self._contents.get(name) is not None

    def value(self, name: str, kind: Kind, default: Any = _REQUIRED, *, nullable: bool = False) -> Any:
        """Return the value of a setting.

        Args:
            default: its value where it is left out; if there is none, it must be there.
            nullable: whether it may be null, which then is the answer.

        Raises:
            ConfigError: if it is of another kind.
        """
        if name not in self._contents and default is not _REQUIRED:
            return default
        value = self._contents.get(name)
        if (value is None and nullable) or (value is not None and kind.fits(value)):
            return value
        if name not in self._contents:
            raise ConfigError(f"{self.where} leaves out {name}, which must be {kind.wanted}: get the file again")
        raise ConfigError(
            f"{self.where} sets {name} to {_shown(value)}, and it must be {kind.wanted}: correct the file"
        )

    def expect(self, name: str, accepted: Iterable[Any], default: Any = None) -> Any:
        """Return the value of a setting of which our models have one or a few values.

        Args:
            default: its value where it is left out.

        Raises:
            ConfigError: if it is something else.
        """
        value, accepted = self._contents.get(name, default), tuple(accepted)
        # In JSON, `true` is not 1.
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in accepted):
            choices = " or ".join(_shown(each) for each in accepted)
            raise ConfigError(
                f"{self.where} sets {name} to {_shown(value)}, and our models have {choices}: this model cannot be "
                "trained here"
            )
        return value

    def section(self, name: str) -> "SettingsFile":
        """Return a section of the file; an empty one if there is none.

        Raises:
            ConfigError: if it is no JSON object.
        """
        contents = self.value(name, SECTION, None, nullable=True)
        return SettingsFile(contents or {}, f"{self.where} {name}")

    def with_value(self, name: str, value: Any) -> "SettingsFile":
        """Return the file with another value for a setting."""
        return SettingsFile({**self._contents, name: value}, self.where)

    def refuse_experts(self) -> None:
        """Raise if the settings describe a mixture of experts."""
        refuse_experts(self._contents, self.where)

    def __bool__(self) -> bool:
        """Whether anything is set."""
        return bool(self._contents)


def _shown(value: object) -> str:
    """Return a value as the file writes it, cut to a length that fits into a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


Fields = Mapping[str, Any]
"""Fields of the model section by name, as far as they are known."""


class Reading(NamedTuple):
    """A file that is being read."""

    file: SettingsFile
    fields: Fields
    """Fields of the model section that the settings before have read."""


class Setting(Protocol):
    """Some keys of `config.json`, and what they mean.

    What `write` returns is the nearest that the family has to a model. `Family.differences` reads it again, and so
    finds out whether it is the same model.
    """

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""

    def read(self, reading: Reading) -> Fields:
        """Return the fields of the model section.

        Raises:
            ConfigError: if our models cannot be so.
        """

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys, for a model that the family can express."""


@dataclass(frozen=True, slots=True)
class Same:
    """A key whose value is that of a field. A null, where there may be one, leaves the field to its default."""

    key: str
    field: str
    kind: Kind
    """Values that it may have."""
    default: Any
    """Its value where it is left out; None: the default of the field."""
    nullable: bool = False
    """Whether it may be null."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.key,)

    def read(self, reading: Reading) -> Fields:
        """Return the field; nothing for a null."""
        value = reading.file.value(self.key, self.kind, self.default, nullable=self.nullable or self.default is None)
        return {} if value is None else {self.field: value}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        return {self.key: getattr(model, self.field)}


@dataclass(frozen=True, slots=True)
class Opposite:
    """A switch that is on where a field is off."""

    key: str
    field: str
    default: bool
    """Its value where it is left out."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.key,)

    def read(self, reading: Reading) -> Fields:
        """Return the field."""
        return {self.field: not reading.file.value(self.key, SWITCH, self.default)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        return {self.key: not getattr(model, self.field)}


@dataclass(frozen=True, slots=True)
class Reciprocal:
    """A number x where ours is x to a power: the factor that a divisor is, or the scale of a head's width."""

    key: str
    field: str
    power: float
    """Power of theirs that is ours."""
    default: float
    """Its value where it is left out."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.key,)

    def read(self, reading: Reading) -> Fields:
        """Return the field."""
        return {self.field: float(reading.file.value(self.key, NUMBER, self.default) ** self.power)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key, as a whole number if it is one but for rounding."""
        value = getattr(model, self.field) ** (1 / self.power)
        whole = round(value)
        return {self.key: whole if abs(value - whole) <= 1e-9 * value else value}


@dataclass(frozen=True, slots=True)
class Word:
    """A key with words of its own."""

    key: str
    field: str
    words: Mapping[str, str]
    default: str
    """Their word where it is left out, and the one that is written where several mean the same."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.key,)

    def read(self, reading: Reading) -> Fields:
        """Return the field."""
        return {self.field: self.words[reading.file.expect(self.key, self.words, self.default)]}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the key."""
        ours = getattr(model, self.field)
        fitting = [theirs for theirs in (self.default, *self.words) if self.words[theirs] == ours]
        return {self.key: fitting[0] if fitting else self.default}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of which our models have a single meaning."""

    key: str
    accepted: tuple[Any, ...]
    """Values with that meaning; the first is its value where it is left out."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.key,)

    def read(self, reading: Reading) -> Fields:
        """Return nothing, or refuse the model."""
        reading.file.expect(self.key, self.accepted, self.accepted[0])
        return {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return nothing."""
        return {}


class Always:
    """Fields that are the same in every model of a family."""

    keys: Sequence[str] = ()

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def read(self, reading: Reading) -> Fields:
        """Return the fields."""
        return self._fields

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return nothing."""
        return {}


@dataclass(frozen=True, slots=True)
class Written:
    """Keys that say how a model was trained. They are written and not read: training is a matter of flags."""

    fields: Mapping[str, str | None]
    """The field of each key; None for one that is not written either."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return tuple(self.fields)

    def read(self, reading: Reading) -> Fields:
        """Return nothing."""
        return {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        return {key: getattr(model, name) for key, name in self.fields.items() if name is not None}


@dataclass(frozen=True, slots=True)
class Biases:
    """Which matrices have biases: for each kind of matrix a constant, or the key that says it."""

    qkv: bool | str = False
    """Of queries, keys and values."""
    projection: bool | str = False
    """Of the projection behind attention."""
    mlp: bool | str = False
    default: bool = False
    """Value of a key that is left out."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return tuple(dict.fromkeys(each for each in (self.qkv, self.projection, self.mlp) if isinstance(each, str)))

    def read(self, reading: Reading) -> Fields:
        """Return the fields."""

        def has(each: bool | str) -> bool:
            return each if isinstance(each, bool) else bool(reading.file.value(each, SWITCH, self.default))

        qkv, projection, mlp = has(self.qkv), has(self.projection), has(self.mlp)
        if qkv and projection and mlp:
            return {"disable_bias_linear": False}
        return {
            "disable_bias_linear": True,
            "add_qkv_bias": qkv and not projection,
            "add_attention_bias": qkv and projection,
            "add_mlp_bias": mlp,
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        pairs = (
            (self.qkv, model.has_qkv_bias),
            (self.projection, model.has_projection_bias),
            (self.mlp, model.has_mlp_bias),
        )
        return {key: has for key, has in pairs if isinstance(key, str)}


GATED: Mapping[str, str] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
    "gelu": "geglu-exact",
}
"""Our activation functions of gated MLPs, by their names of what is before the gate."""

UNGATED: Mapping[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu-exact",
    "relu": "relu",
    "relu2": "squared-relu",
}
"""Our activation functions of MLPs without a gate, by their names there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeKeys:
    """Names of the sizes, where they differ from those of most families."""

    hidden_size: str = "hidden_size"
    num_layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    positions: str = "max_position_embeddings"
    ffn: str = "intermediate_size"
    init: str = "initializer_range"


def sizes(keys: SizeKeys | None = None, /, *, tied: bool = False, **defaults: Any) -> tuple[Setting, ...]:
    """Return the settings of the sizes that every family has.

    Args:
        tied: whether the output layer shares the word embedding where the file does not say.
        **defaults: their values where they are left out, by their keys.
    """
    keys = keys or SizeKeys()
    named = (
        ("vocab_size", "vocab_size", COUNT),
        (keys.positions, "max_position_embeddings", COUNT),
        (keys.hidden_size, "hidden_size", COUNT),
        (keys.ffn, "ffn_hidden_size", COUNT),
        (keys.num_layers, "num_layers", COUNT),
        (keys.heads, "num_attention_heads", COUNT),
        (keys.init, "init_method_std", NUMBER),
    )
    return (
        *(Same(key, name, kind, defaults[key]) for key, name, kind in named),
        Opposite("tie_word_embeddings", "untie_embeddings_and_output_weights", tied),
    )


def heads_of_keys(default: int | None) -> Same:
    """Return the setting of key and value heads; null for as many as query heads."""
    return Same("num_key_value_heads", "num_key_value_heads", COUNT, default, nullable=True)


HEAD_SIZE = Same("head_dim", "kv_channels", COUNT, None)
"""Width of a head; null for hidden size over heads."""
