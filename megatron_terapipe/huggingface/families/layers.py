"""Settings of single layers in `config.json`: windows, and layers without rotations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.setting import Fields, Reading
from megatron_terapipe.huggingface.families.settings_file import BITS, COUNT, NATURAL, SWITCH, WORDS, SettingsFile

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
