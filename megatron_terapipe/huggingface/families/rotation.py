"""Rotary positions in `config.json`: base, part of the head, and scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from megatron_terapipe.config.fields.options import one_of
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.config.model.rotation import listed_factors, longrope_attention_factor
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.setting import Fields, Reading, Setting
from megatron_terapipe.huggingface.families.settings_file import COUNT, NUMBER, NUMBERS, WORD, SettingsFile

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
