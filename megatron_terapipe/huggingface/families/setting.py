"""Settings of a family: keys of `config.json`, and the fields of the model section that mean the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.huggingface.families.settings_file import COUNT, NUMBER, SWITCH, Kind, SettingsFile

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
