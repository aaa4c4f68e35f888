"""Settings of a `config.json` with several keys.

Rotary positions and their scaling; windows, and layers without rotations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import one_of
from megatron_terapipe.config.rotation import listed_factors, longrope_attention_factor
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.settings import (
    BITS,
    COUNT,
    NATURAL,
    NUMBER,
    NUMBERS,
    SWITCH,
    WORD,
    WORDS,
    Fields,
    Reading,
    Setting,
    SettingsFile,
)

WHATEVER_LENGTH = ("linear", "llama3", "yarn")
"""Scalings of the rotations that do not depend on the length of a sequence, by their names there."""

SCALINGS = (*WHATEVER_LENGTH, "dynamic", "longrope")
"""Scalings that our models have. The last two depend on the length of sequences, which is `--seq-length` in a run."""

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Sections of the scaling. Files of transformers 4 have the first, those of 5 the second; of two, it reads the first
that is not empty."""


_ORIGINAL = "original_max_position_embeddings"
"""Key of the tokens of sequences before scaling."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
"""Sections of `rope_parameters` in Gemma 3, whose layers with a window have rotations of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Positions that rotate queries and keys."""

    base: float = 10000.0
    """Base of the wavelengths where it is left out."""
    base_key: str = "rope_theta"
    """Its key outside the section."""
    part: float | None = None
    """Fraction of the head that is rotated where it is left out; None where it is always all of it."""
    part_key: str = "partial_rotary_factor"
    """Its key outside the section."""
    scalings: tuple[str, ...] = SCALINGS
    """Scalings that the family has."""
    original_length: int | None = None
    """Tokens of sequences before scaling where the key for it, which the family has outside the section, is left out;
    None where it is within the section."""
    older_names: tuple[str, ...] = ()
    """Names of `longrope` in older files."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        outside = () if self.original_length is None else (_ORIGINAL,)
        return (self.base_key, self.part_key, *outside, *_SECTIONS)

    def read(self, reading: Reading) -> Fields:
        """Return the fields of rotations."""
        file, fields = reading
        section = next((found for name in _SECTIONS if (found := file.section(name))), file.section(_SECTIONS[0]))
        for layer_type in _LAYER_TYPES:
            section.expect(layer_type, (None,))
        if self.original_length is not None:
            # Transformers hands what is outside to the section, whatever it says.
            section = section.with_value(_ORIGINAL, file.value(_ORIGINAL, COUNT, self.original_length))
        if scaling_of(section) in self.older_names:
            section = section.with_value("rope_type", "longrope")
        return {
            "position_embedding_type": "rope",
            "rotary_base": float(section.value("rope_theta", NUMBER, file.value(self.base_key, NUMBER, self.base))),
            **self._part(file, section),
            **read_scaling(section, int(fields["max_position_embeddings"]), self.scalings),
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys, in the form that transformers 4 and 5 read."""
        part = {} if self.part is None else {self.part_key: model.rotary_percent}
        keys = {self.base_key: model.rotary_base, **part, "rope_scaling": written_scaling(model)}
        if self.original_length is not None and model.rotary_scaling != "none":
            keys[_ORIGINAL] = model.rotary_original_length
        return keys

    def _part(self, file: SettingsFile, section: SettingsFile) -> Fields:
        if self.part is None:
            for each in (section, file):
                each.expect(self.part_key, (1, None))
            return {}
        outside = file.value(self.part_key, NUMBER, self.part)
        return {"rotary_percent": float(section.value("partial_rotary_factor", NUMBER, outside))}


def scaling_of(section: SettingsFile) -> str:
    """Name of the scaling that a section describes."""
    return str(section.value("rope_type", WORD, section.value("type", WORD, "default")))


def read_scaling(section: SettingsFile, max_positions: int, accepted: Sequence[str] = SCALINGS) -> Fields:
    """Return the fields of the scaling that a section describes.

    Args:
        section: the section; it may be empty.

    Raises:
        ConfigError: if our models have no such scaling.
    """
    kind = scaling_of(section)
    if kind == "default":
        return {"rotary_scaling": "none"}
    if kind not in accepted:
        choices = f"not at all, or as {one_of(accepted)}" if accepted else "not at all"
        raise ConfigError(
            f"{section.where} scales the rotations of positions as {kind}, and our models {choices}: this model "
            "cannot be trained here"
        )
    fields: dict[str, Any] = {"rotary_scaling": kind}
    before = max_positions
    if kind not in ("linear", "dynamic"):
        before = section.value(_ORIGINAL, COUNT, max_positions)
    if kind != "linear":
        # With dynamic the longest sequence of the file is the one before scaling, whatever else it says.
        fields["rotary_original_length"] = before
    if kind == "llama3":
        fields["rotary_low_frequency_factor"] = float(section.value("low_freq_factor", NUMBER))
        fields["rotary_high_frequency_factor"] = float(section.value("high_freq_factor", NUMBER))
    if kind == "yarn":
        return {**fields, **_read_yarn(section, max_positions / before)}
    if kind == "longrope":
        return {**fields, **_read_longrope(section, before, max_positions / before)}
    return {**fields, "rotary_scaling_factor": float(section.value("factor", NUMBER))}


def _read_longrope(section: SettingsFile, before: int, stretch: float) -> Fields:
    """Return the fields that only `longrope` has (Ding et al., arXiv 2402.13753).

    Args:
        stretch: how many times longer the sequences are than before; the factor where none is given.
    """
    factor = float(section.value("factor", NUMBER, stretch, nullable=True) or stretch)
    given = section.value("attention_factor", NUMBER, None, nullable=True)
    return {
        "rotary_scaling_factor": factor,
        "rotary_attention_factor": longrope_attention_factor(factor, before) if given is None else float(given),
        "rotary_short_factors": _listed(section.value("short_factor", NUMBERS)),
        "rotary_long_factors": _listed(section.value("long_factor", NUMBERS)),
    }


def _listed(factors: Sequence[float]) -> str:
    return ",".join(str(float(each)) for each in factors)


def _read_yarn(section: SettingsFile, stretch: float) -> Fields:
    """Return the fields of YaRN (Peng et al., arXiv 2309.00071) that only it has.

    Args:
        stretch: how many times longer the sequences are than before; the factor where none is given.
    """
    section.expect("truncate", (True, None))
    fields = {"rotary_scaling_factor": float(section.value("factor", NUMBER, stretch, nullable=True) or stretch)}
    for key, field in (("beta_fast", "rotary_beta_fast"), ("beta_slow", "rotary_beta_slow")):
        beta = section.value(key, NUMBER, None, nullable=True)
        if beta is not None:
            fields[field] = float(beta)
    given = section.value("attention_factor", NUMBER, None, nullable=True)
    weight, weight_of_all = (section.value(key, NUMBER, None, nullable=True) for key in ("mscale", "mscale_all_dim"))
    if given is None and weight is not None and weight_of_all is not None:
        # DeepSeek's form, with a weight for the rotated channels and one for all.
        length = log(max(1.0, fields["rotary_scaling_factor"]))
        given = (0.1 * weight * length + 1) / (0.1 * weight_of_all * length + 1)
    if given is not None:
        fields["rotary_attention_factor"] = float(given)
    return fields


def written_scaling(model: ModelConfig) -> Mapping[str, Any] | None:
    """Return the section that describes the scaling of a model; None if it has none."""
    if model.rotary_scaling == "none":
        return None
    section: dict[str, Any] = {"rope_type": model.rotary_scaling, "factor": model.rotary_scaling_factor}
    if model.rotary_scaling != "linear":
        section[_ORIGINAL] = model.rotary_original_length
    if model.rotary_scaling == "dynamic":
        del section[_ORIGINAL]
    if model.rotary_scaling == "longrope":
        section["attention_factor"] = model.rotary_attention_factor
        section["short_factor"] = list(listed_factors(model, "rotary_short_factors"))
        section["long_factor"] = list(listed_factors(model, "rotary_long_factors"))
    if model.rotary_scaling == "llama3":
        section["low_freq_factor"] = model.rotary_low_frequency_factor
        section["high_freq_factor"] = model.rotary_high_frequency_factor
    if model.rotary_scaling == "yarn":
        section["attention_factor"] = model.rotary_attention_factor
        section["beta_fast"], section["beta_slow"] = model.rotary_beta_fast, model.rotary_beta_slow
    return section


class RotationByLayer:
    """Rotations of Gemma 3: those of layers with a window have a base of their own, and are never scaled."""

    _BASE, _LOCAL_BASE = 1_000_000.0, 10_000.0

    def __init__(self, windows: Setting) -> None:
        self._windows = windows

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", *_SECTIONS, *self._windows.keys)

    def read(self, reading: Reading) -> Fields:
        """Return the fields of windows and rotations."""
        file, fields = reading
        windows = self._windows.read(reading)
        nested, scaling = file.section("rope_parameters"), file.section("rope_scaling")
        whole, local = map(nested.section, _LAYER_TYPES)
        for each in (nested, scaling, whole, local, file):
            each.expect("partial_rotary_factor", (1, None))
        if nested and not whole and not local:
            raise ConfigError(f"{nested.where} has neither full_attention nor sliding_attention: get the file again")
        local.expect("rope_type", ("default",), "default")
        base = whole.value("rope_theta", NUMBER, file.value("rope_theta", NUMBER, self._BASE))
        of_windows = local.value("rope_theta", NUMBER, file.value("rope_local_base_freq", NUMBER, self._LOCAL_BASE))
        return {
            **windows,
            "position_embedding_type": "rope",
            "rotary_base": float(scaling.value("rope_theta", NUMBER, base)),
            **({"rotary_base_local": float(of_windows)} if windows else {}),
            **read_scaling(scaling or whole, int(fields["max_position_embeddings"]), WHATEVER_LENGTH),
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys, in the form that transformers 4 and 5 read."""
        return {
            **self._windows.write(model),
            "rope_theta": model.rotary_base,
            "rope_local_base_freq": model.rotary_base_local or self._LOCAL_BASE,
            "rope_scaling": written_scaling(model),
        }


_WINDOW, _WHOLE = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class WindowOfAll:
    """A window that all layers have, or none."""

    default: int | None = None
    """Tokens of it where the file does not say; None for none."""
    keys = ("sliding_window", "layer_types")

    def read(self, reading: Reading) -> Fields:
        """Return the fields of windows."""
        file, fields = reading
        window = file.value("sliding_window", COUNT, self.default, nullable=True)
        types = _layer_types(file, fields)
        if types is not None and set(types) != {window is not None}:
            raise ConfigError(
                f"{file.where} has layer_types beside one sliding_window for all layers, and contradicts itself: this "
                "model cannot be trained here"
            )
        return {"sliding_window": window}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        return {"sliding_window": model.sliding_window}


@dataclass(frozen=True, slots=True)
class WindowByType:
    """A window that some layers have: those of a type, or, without a list of types, all but every Nth."""

    every: int
    """N where the file does not say."""
    every_key: str | None = None
    """Key of N; None if it has none."""

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return ("sliding_window", "layer_types", *([self.every_key] if self.every_key else []))

    def read(self, reading: Reading) -> Fields:
        """Return the fields of windows."""
        file, fields = reading
        every = self.every if self.every_key is None else file.value(self.every_key, COUNT, self.every)
        types = _layer_types(file, fields)
        has_window = types or [(index + 1) % every != 0 for index in range(fields["num_layers"])]
        return _windows(file, file.value("sliding_window", COUNT, 4096, nullable=True), has_window)

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        return {"sliding_window": model.sliding_window, "layer_types": _written_types(model)}


class WindowAfterLayer:
    """A window that layers from a number on have, if windows are switched on at all: as in Qwen."""

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    _FIRST = 28

    def read(self, reading: Reading) -> Fields:
        """Return the fields of windows."""
        file, fields = reading
        window = file.value("sliding_window", COUNT, 4096, nullable=True)
        if not file.value("use_sliding_window", SWITCH, False):
            window = None
        first = file.value("max_window_layers", NATURAL, self._FIRST)
        types = _layer_types(file, fields)
        has_window = types or [window is not None and index >= first for index in range(fields["num_layers"])]
        return _windows(file, window, has_window)

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        has_window = [block.window is not None for block in model.blocks]
        return {
            "use_sliding_window": any(has_window),
            "sliding_window": model.sliding_window,
            "max_window_layers": has_window.index(True) if any(has_window) else model.num_layers,
            "layer_types": _written_types(model),
        }


class RotatedLayers:
    """Layers that are not rotated: every fourth, unless the file lists a 1 for each one that is."""

    keys = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")
    _EVERY = 4

    def read(self, reading: Reading) -> Fields:
        """Return the fields of rotations by layer."""
        file, fields = reading
        file.expect("use_sliding_window", (False,), False)
        if any(_layer_types(file, fields) or ()):
            raise ConfigError(f"{file.where} has layer_types with a window, and use_sliding_window false: correct it")
        every = file.value("no_rope_layer_interval", COUNT, self._EVERY)
        rotated = file.value("no_rope_layers", BITS, None, nullable=True)
        layers = fields["num_layers"]
        if rotated is None:
            rotated = [int((index + 1) % every != 0) for index in range(layers)]
        _check_length(file, "no_rope_layers", rotated, layers)
        unrotated = [not each for each in rotated]
        return {"no_rope_freq": pattern_of(unrotated, unrotated)} if any(unrotated) else {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys."""
        return {"no_rope_layers": [int(block.rotated) for block in model.blocks]}


def pattern_of(listed: Sequence[bool], named: Sequence[bool]) -> str:
    """Return the text that flags of layers read: N for every Nth layer, or else a list of 0 and 1, `[0]*3+[1]`.

    Args:
        listed: for each layer, what a list has of it.
        named: for each layer, whether a number must name it.
    """
    every = named.index(True) + 1 if True in named else 0
    if every and all(name == ((index + 1) % every == 0) for index, name in enumerate(named)):
        return str(every)
    runs = ((int(bit), sum(1 for _ in run)) for bit, run in groupby(listed))
    return "+".join(f"[{bit}]*{length}" for bit, length in runs)


def _windows(file: SettingsFile, window: int | None, has_window: Sequence[bool]) -> Fields:
    if not any(has_window):
        return {}
    if window is None:
        raise ConfigError(f"{file.where} has layers of {_WINDOW} and no sliding_window: get the file again")
    if all(has_window):
        return {"sliding_window": window}
    return {
        "sliding_window": window,
        "window_attn_skip_freq": pattern_of(has_window, [not each for each in has_window]),
    }


def _layer_types(file: SettingsFile, fields: Fields) -> list[bool] | None:
    """Return for each layer whether its type has a window; None if the file lists no types."""
    types = file.value("layer_types", WORDS, None, nullable=True)
    if types is None:
        return None
    for each in types:
        if each not in (_WINDOW, _WHOLE):
            raise ConfigError(
                f"{file.where} has a layer of {each}, and our models have {_WHOLE} and {_WINDOW}: this model cannot be "
                "trained here"
            )
    _check_length(file, "layer_types", types, fields["num_layers"])
    return [each == _WINDOW for each in types]


def _written_types(model: ModelConfig) -> list[str]:
    return [_WHOLE if block.window is None else _WINDOW for block in model.blocks]


def _check_length(file: SettingsFile, key: str, listed: Sequence[Any], layers: int) -> None:
    if len(listed) != layers:
        raise ConfigError(f"{file.where} lists {len(listed)} layers in {key}, and has {layers}: get the file again")
