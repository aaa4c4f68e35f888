"""Rotary positions in `config.json`: base, part of the head, and scaling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from megatron_terapipe.config.fields.options import one_of
from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.setting import Fields, Reading, Setting
from megatron_terapipe.huggingface.families.settings_file import COUNT, NUMBER, WORD, SettingsFile

SCALINGS = ("linear", "llama3", "yarn")
"""Scalings of the rotations that our models have, by their names there."""

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Sections of the scaling. Files of transformers 4 have the first, those of 5 the second; of two, it reads the first
that is not empty."""


_LAYER_TYPES = ("full_attention", "sliding_attention")
"""Sections of `rope_parameters` in Gemma 3, whose layers with a window have rotations of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Positions that rotate queries and keys.

    Attributes:
        base: base of the wavelengths where it is left out.
        base_key: its key outside the section.
        part: fraction of the head that is rotated where it is left out; None where it is always all of it.
        part_key: its key outside the section.
        scalings: scalings that the family has.
    """

    base: float = 10000.0
    base_key: str = "rope_theta"
    part: float | None = None
    part_key: str = "partial_rotary_factor"
    scalings: tuple[str, ...] = SCALINGS

    @property
    def keys(self) -> Sequence[str]:
        """Keys that it understands."""
        return (self.base_key, self.part_key, *_SECTIONS)

    def read(self, reading: Reading) -> Fields:
        """Return the fields of rotations."""
        file, fields = reading
        section = next((found for name in _SECTIONS if (found := file.section(name))), file.section(_SECTIONS[0]))
        for layer_type in _LAYER_TYPES:
            section.expect(layer_type, (None,))
        return {
            "position_embedding_type": "rope",
            "rotary_base": float(section.value("rope_theta", NUMBER, file.value(self.base_key, NUMBER, self.base))),
            **self._part(file, section),
            **read_scaling(section, int(fields["max_position_embeddings"]), self.scalings),
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys, in the form that transformers 4 and 5 read."""
        part = {} if self.part is None else {self.part_key: model.rotary_percent}
        return {self.base_key: model.rotary_base, **part, "rope_scaling": written_scaling(model)}

    def _part(self, file: SettingsFile, section: SettingsFile) -> Fields:
        if self.part is None:
            for each in (section, file):
                each.expect(self.part_key, (1, None))
            return {}
        outside = file.value(self.part_key, NUMBER, self.part)
        return {"rotary_percent": float(section.value("partial_rotary_factor", NUMBER, outside))}


def read_scaling(section: SettingsFile, max_positions: int, accepted: Sequence[str] = SCALINGS) -> Fields:
    """Return the fields of the scaling that a section describes.

    Args:
        section: the section; it may be empty.
        max_positions: longest sequence of the model.
        accepted: scalings that the family has.

    Raises:
        ConfigError: if our models have no such scaling.
    """
    kind = section.value("rope_type", WORD, section.value("type", WORD, "default"))
    if kind == "default":
        return {"rotary_scaling": "none"}
    if kind not in accepted:
        choices = f"not at all, or as {one_of(accepted)}" if accepted else "not at all"
        raise ConfigError(
            f"{section.where} scales the rotations of positions as {kind}, and our models {choices}: this model "
            "cannot be trained here"
        )
    fields: dict[str, Any] = {"rotary_scaling": kind}
    if kind != "linear":
        before = section.value("original_max_position_embeddings", COUNT, max_positions)
        fields["rotary_original_length"] = before
    if kind == "llama3":
        fields["rotary_low_frequency_factor"] = float(section.value("low_freq_factor", NUMBER))
        fields["rotary_high_frequency_factor"] = float(section.value("high_freq_factor", NUMBER))
    if kind == "yarn":
        return {**fields, **_read_yarn(section, max_positions / before)}
    return {**fields, "rotary_scaling_factor": float(section.value("factor", NUMBER))}


def _read_yarn(section: SettingsFile, stretch: float) -> Fields:
    """Return the fields of YaRN (Peng et al., arXiv 2309.00071) that only it has.

    Args:
        section: the section.
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
        section["original_max_position_embeddings"] = model.rotary_original_length
    if model.rotary_scaling == "llama3":
        section["low_freq_factor"] = model.rotary_low_frequency_factor
        section["high_freq_factor"] = model.rotary_high_frequency_factor
    if model.rotary_scaling == "yarn":
        section["attention_factor"] = model.rotary_attention_factor
        section["beta_fast"], section["beta_slow"] = model.rotary_beta_fast, model.rotary_beta_slow
    return section


class RotationByLayer:
    """Rotations of Gemma 3: those of layers with a window have a base of their own, and are never scaled.

    Args:
        windows: setting of the windows.
    """

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
            **read_scaling(scaling or whole, int(fields["max_position_embeddings"])),
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Return the keys, in the form that transformers 4 and 5 read."""
        return {
            **self._windows.write(model),
            "rope_theta": model.rotary_base,
            "rope_local_base_freq": model.rotary_base_local or self._LOCAL_BASE,
            "rope_scaling": written_scaling(model),
        }
