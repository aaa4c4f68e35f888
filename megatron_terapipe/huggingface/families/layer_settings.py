"""Settings of several keys: rotary positions and their scaling; windows, and layers without rotations."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isclose, log
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import one_of
from megatron_terapipe.config.rotation import listed_factors, longrope_attention_factor
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.huggingface.families.settings import (
    BITS,
    COUNT,
    NATURAL,
    NOT_NEGATIVE,
    NUMBER,
    NUMBERS,
    SWITCH,
    WORD,
    WORDS,
    Fields,
    Setting,
    SettingsFile,
)

WHATEVER_LENGTH = ("linear", "llama3", "yarn")
"""Scalings of the rotations that do not depend on the length of a sequence, by their names there."""

SCALINGS = (*WHATEVER_LENGTH, "dynamic", "longrope")
"""Scalings that our models have. The last two depend on the length of sequences, which is `--seq-length` in a run."""

_SECTIONS = ("rope_scaling", "rope_parameters")
"""Sections of the scaling. Files of transformers 4 have the first, files of 5 the second; of two, it reads the first
that is not empty."""

_ORIGINAL = "original_max_position_embeddings"
"""Key of the tokens of sequences before scaling."""

_SCALING_KEYS: Mapping[str, Mapping[str, str]] = {
    "llama3": {
        "low_freq_factor": "rotary_low_frequency_factor",
        "high_freq_factor": "rotary_high_frequency_factor",
    },
    # Peng et al., arXiv 2309.00071
    "yarn": {
        "attention_factor": "rotary_attention_factor",
        "beta_fast": "rotary_beta_fast",
        "beta_slow": "rotary_beta_slow",
    },
    # Ding et al., arXiv 2402.13753
    "longrope": {"attention_factor": "rotary_attention_factor"},
}
"""Fields of the numbers that only one scaling has, by their keys."""

_LISTS = {"short_factor": "rotary_short_factors", "long_factor": "rotary_long_factors"}
"""Fields of the lists of `longrope`, by their keys."""

_WINDOW, _WHOLE, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Types of layers, and sections of `rope_parameters` in Gemma 3: layers with a window have rotations of their own."""


def rotations(
    *,
    base: float = 10000.0,
    base_key: str = "rope_theta",
    part: float | None = None,
    part_key: str = "partial_rotary_factor",
    scalings: tuple[str, ...] = SCALINGS,
    original_length: int | None = None,
    usual: Mapping[str, Any] | None = None,
    older_names: tuple[str, ...] = (),
) -> Setting:
    """Return the setting of positions that rotate queries and keys.

    Args:
        part: default of the rotated fraction of the head; None if it is always 1.
        original_length: default of the length before scaling, if the family writes it outside the section; None if it
            is within the section.
        usual: the section of a file without one; None for rotations without scaling.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        missing = SettingsFile(usual or {}, f"{file.where} {_SECTIONS[0]}")
        section = next((each for name in _SECTIONS if (each := file.section(name))), missing)
        for layer_type in (_WHOLE, _WINDOW):
            section.expect(layer_type, (None,))
        # In transformers the key outside replaces that of the section.
        outside = file.value(_ORIGINAL, COUNT, original_length, nullable=original_length is None)
        if outside is not None:
            section = section.with_value(_ORIGINAL, outside)
        if _scaling_of(section) in older_names:
            section = section.with_value("rope_type", "longrope")
        found: dict[str, Any] = {
            "position_embedding_type": "rope",
            "rotary_base": float(section.value("rope_theta", NUMBER, file.value(base_key, NUMBER, base))),
        }
        if part is None:
            for each in (section, file):
                each.expect(part_key, (1, None))
        else:
            fraction = file.value(part_key, NUMBER, part)
            found["rotary_percent"] = float(section.value("partial_rotary_factor", NUMBER, fraction))
        return {**found, **_read_scaling(section, int(fields["max_position_embeddings"]), scalings)}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        fraction = {} if part is None else {part_key: model.rotary_percent}
        scaling = _written_scaling(model, length_outside=original_length is not None)
        # In the form that transformers 4 and 5 read.
        keys: dict[str, Any] = {base_key: model.rotary_base, **fraction, "rope_scaling": scaling}
        if original_length is not None and model.rotary_scaling != "none":
            keys[_ORIGINAL] = model.rotary_original_length
        if model.rotary_scaling == "dynamic":
            keys["max_position_embeddings"] = model.rotary_original_length
        return keys

    return Setting((base_key, part_key, _ORIGINAL, *_SECTIONS), read, write)


def with_scaled_queries(usual: Setting) -> Setting:
    """Return a setting of rotations whose section has the factor of queries by their positions, too."""
    key = "llama_4_scaling_beta"

    def read(file: SettingsFile, fields: Fields) -> Fields:
        section = next((each for name in _SECTIONS if (each := file.section(name))), None)
        found, beta = usual.read(file, fields), 0.1 if section is None else section.value(key, NOT_NEGATIVE)
        if section is not None and found["rotary_scaling"] != "yarn":
            raise section.refusal(key, "queries are scaled by a length that only rotations with YaRN have")
        return {**found, "query_scaling_beta": float(beta)}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        keys, section = usual.write(model), usual.write(model)["rope_scaling"]
        return {**keys, "rope_scaling": section and {**section, key: model.query_scaling_beta}}

    return Setting(usual.keys, read, write)


def _scaling_of(section: SettingsFile) -> str:
    """Name of the scaling that a section describes."""
    return str(section.value("rope_type", WORD, section.value("type", WORD, "default")))


def _read_scaling(section: SettingsFile, max_positions: int, accepted: Sequence[str]) -> Fields:
    """Return the fields of the scaling that a section, which may be empty, describes."""
    kind = _scaling_of(section)
    if kind == "default":
        return {"rotary_scaling": "none"}
    if kind not in accepted:
        choices = f"not at all, or as {one_of(accepted)}" if accepted else "not at all"
        raise ConfigError(
            f"{section.where} scales the rotations of positions as {kind}, and our models {choices}: this model "
            "cannot be trained here"
        )
    before = max_positions if kind in ("linear", "dynamic") else section.value(_ORIGINAL, COUNT, max_positions)
    fields: dict[str, Any] = {"rotary_scaling": kind}
    if kind != "linear":
        # With dynamic the length before scaling is always the longest sequence of the file.
        fields["rotary_original_length"] = before
    if kind == "yarn":
        fields["rotary_unrounded_ramp"] = not section.value("truncate", SWITCH, True)

    def number(key: str, required: bool = kind not in ("yarn", "longrope")) -> float | None:
        value = section.value(key, NUMBER) if required else section.value(key, NUMBER, None, nullable=True)
        return None if value is None else float(value)

    fields |= {field: number(key) for key, field in _SCALING_KEYS.get(kind, {}).items()}
    factor = fields["rotary_scaling_factor"] = number("factor") or max_positions / before
    attention = fields.get("rotary_attention_factor")
    if kind == "yarn":
        weight, weight_of_all = number("mscale"), number("mscale_all_dim")
        if attention is None and weight is not None and weight_of_all is not None:
            # DeepSeek's form, with a weight for the rotated channels and one for all.
            length = log(max(1.0, factor))
            fields["rotary_attention_factor"] = (0.1 * weight * length + 1) / (0.1 * weight_of_all * length + 1)
    if kind == "longrope":
        fields["rotary_attention_factor"] = attention or longrope_attention_factor(factor, before)
        for key, field in _LISTS.items():
            fields[field] = ",".join(str(float(each)) for each in section.value(key, NUMBERS))
    return {name: value for name, value in fields.items() if value is not None}


def has_own_longrope(model: ModelConfig) -> bool:
    """Whether there are factors of a longrope that do not follow from its lengths."""
    before = model.rotary_original_length or 1
    factor = model.max_position_embeddings / before
    own = model.rotary_scaling_factor, model.rotary_attention_factor or 0.0
    computed = factor, longrope_attention_factor(factor, before)
    return model.rotary_scaling == "longrope" and not all(map(isclose, own, computed))


def has_rotations_of_windows(model: ModelConfig) -> bool:
    """Whether layers with a window have other rotations than the others."""
    local = model.rotary_base_local
    return local is not None and (local != model.rotary_base or model.rotary_scaling != "none")


def _written_scaling(model: ModelConfig, *, length_outside: bool = False) -> Mapping[str, Any] | None:
    """Return the section that describes the scaling of a model; None if it has none.

    Args:
        length_outside: whether the length before scaling is outside; then transformers 4 reads three keys of longrope.
    """
    kind = model.rotary_scaling
    if kind == "none":
        return None
    if length_outside and kind == "longrope" and not has_own_longrope(model):
        return {"type": kind, **{key: list(listed_factors(model, field)) for key, field in _LISTS.items()}}
    section: dict[str, Any] = {"rope_type": kind, "factor": model.rotary_scaling_factor}
    if kind not in ("linear", "dynamic"):
        section[_ORIGINAL] = model.rotary_original_length
    section |= {key: getattr(model, field) for key, field in _SCALING_KEYS.get(kind, {}).items()}
    if model.rotary_unrounded_ramp:
        section["truncate"] = False
    if kind == "longrope":
        section |= {key: list(listed_factors(model, field)) for key, field in _LISTS.items()}
    return section


def rotations_by_alpha() -> Setting:
    """Return the rotations of Hunyuan, whose `dynamic` scaling with an `alpha` is a larger base for any length."""
    usual = rotations()

    def read(file: SettingsFile, fields: Fields) -> Fields:
        section = file.section("rope_scaling") or file.section("rope_parameters")
        alpha = section.value("alpha", NUMBER, None, nullable=True)
        if alpha is None or _scaling_of(section) != "dynamic":
            return usual.read(file, fields)
        width = fields.get("kv_channels") or fields["hidden_size"] // fields["num_attention_heads"]
        base = section.value("rope_theta", NUMBER, file.value("rope_theta", NUMBER, 10000.0))
        larger = {"rope_theta": base * alpha ** (width / (width - 2)), "rope_type": "default"}
        return usual.read(file.with_value("rope_scaling", larger), fields)

    return Setting(usual.keys, read, usual.write)


def rotations_by_layer(
    windows: Setting,
    usual_base: float = 1_000_000.0,
    usual_local_base: float = 10_000.0,
    *,
    nested: bool = False,
    older: bool = True,
) -> Setting:
    """Return the rotations of Gemma 3: layers with a window have a base of their own, and no scaling.

    Args:
        nested: whether transformers 5 needs sections; transformers 4 reads none, and has one base for all.
        older: whether transformers 4 has the family.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        found = windows.read(file, fields)
        nested, scaling = file.section("rope_parameters"), file.section("rope_scaling")
        whole, local = nested.section(_WHOLE), nested.section(_WINDOW)
        for each in (nested, scaling, whole, local, file):
            each.expect("partial_rotary_factor", (1, None))
        if nested and not whole and not local:
            raise ConfigError(f"{nested.where} has neither full_attention nor sliding_attention: get the file again")
        local.expect("rope_type", ("default",), "default")
        base = whole.value("rope_theta", NUMBER, file.value("rope_theta", NUMBER, usual_base))
        of_windows = local.value("rope_theta", NUMBER, file.value("rope_local_base_freq", NUMBER, usual_local_base))
        return {
            **found,
            "position_embedding_type": "rope",
            "rotary_base": float(scaling.value("rope_theta", NUMBER, base)),
            **({"rotary_base_local": float(of_windows)} if found else {}),
            **_read_scaling(scaling or whole, int(fields["max_position_embeddings"]), WHATEVER_LENGTH),
        }

    def write(model: ModelConfig) -> Mapping[str, Any]:
        local, scaling = model.rotary_base_local or usual_local_base, _written_scaling(model)
        found = dict(windows.write(model))
        if older:
            # In the form that transformers 4 and 5 read.
            found |= {"rope_theta": model.rotary_base, "rope_scaling": scaling}
        if nested:
            whole = {"rope_theta": model.rotary_base, **(scaling or {"rope_type": "default"})}
            sections = {_WHOLE: whole, _WINDOW: {"rope_type": "default", "rope_theta": local}}
            return {**found, "rope_parameters": sections}
        return {**found, "rope_local_base_freq": local}

    own = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", *_SECTIONS)
    return Setting((*own, *windows.keys), read, write)


def window_of_all(default: int | None = None) -> Setting:
    """Return the setting of a window that all layers have, or none.

    Args:
        default: its tokens where the key is missing; None for no window.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        window = file.value("sliding_window", COUNT, default, nullable=True)
        types = _layer_types(file, fields)
        if types is not None and set(types) != {window is not None}:
            raise ConfigError(
                f"{file.where} has layer_types and one sliding_window for all layers, a contradiction: this "
                "model cannot be trained here"
            )
        return {"sliding_window": window}

    return Setting(("sliding_window", "layer_types"), read, lambda model: {"sliding_window": model.sliding_window})


def window_by_type(usual: int | None, every_key: str | None = None, *, tokens: int = 4096) -> Setting:
    """Return the window that layers of a type have, or, without a list of types, all but every Nth.

    Args:
        usual: N where the key is missing; None if without types all layers have the window, if there is one.
        every_key: key of N; None if it has none.
        tokens: default of the window.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        every = usual if every_key is None else file.value(every_key, COUNT, usual)
        window = file.value("sliding_window", COUNT, tokens, nullable=True)
        without = [window is not None if every is None else (i + 1) % every != 0 for i in range(fields["num_layers"])]
        return _windows(file, window, _layer_types(file, fields) or without)

    def write(model: ModelConfig) -> Mapping[str, Any]:
        # Without windows, too, transformers needs a number there.
        window = model.sliding_window or model.max_position_embeddings
        return {"sliding_window": window, "layer_types": _types_of(model)}

    return Setting(("sliding_window", "layer_types", *([every_key] if every_key else [])), read, write)


def window_or_unrotated(default: int = 4096, every_key: str = "sliding_window_pattern") -> Setting:
    """Return the window of most layers; if there is one, the layers without it are not rotated.

    Args:
        default: tokens of the window where the key is missing.
        every_key: key of N, where every Nth layer has no window and there is no list of types.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        window = file.value("sliding_window", COUNT, default, nullable=True)
        has_window = _layer_types(file, fields)
        if has_window is None:
            every = 4 if window is None else file.value(every_key, COUNT, 4)
            has_window = [window is not None and (i + 1) % every != 0 for i in range(fields["num_layers"])]
        unrotated = [window is not None and not each for each in has_window]
        rotated = {"no_rope_freq": pattern_of(unrotated, unrotated)} if any(unrotated) else {}
        return {**_windows(file, window, has_window), **rotated}

    def write(model: ModelConfig) -> Mapping[str, Any]:
        return {"sliding_window": model.sliding_window, "layer_types": _types_of(model)}

    return Setting(("sliding_window", "layer_types", every_key), read, write)


def windows_by_number(
    first: int = 28, *, switch: str | None = "use_sliding_window", even_before: bool = False
) -> Setting:
    """Return the window of Qwen's layers from a number on, or of the layers of even index before it.

    Args:
        first: that number where the key is missing.
        switch: key that switches windows on; None if they have none.
    """

    def read(file: SettingsFile, fields: Fields) -> Fields:
        # transformers writes 0 for none.
        window = file.value("sliding_window", NATURAL, 4096, nullable=True) or None
        if switch is not None and not file.value(switch, SWITCH, False):
            window = None
        number, layers = file.value("max_window_layers", NATURAL, first), range(fields["num_layers"])
        named = [i < number and i % 2 == 0 if even_before else i >= number for i in layers]
        without = [window is not None and each for each in named]
        return _windows(file, window, _layer_types(file, fields) or without)

    def write(model: ModelConfig) -> Mapping[str, Any]:
        has_window = [block.window is not None for block in model.blocks]
        return {
            **({} if switch is None else {switch: any(has_window)}),
            "sliding_window": model.sliding_window,
            "max_window_layers": has_window.index(True) if any(has_window) else model.num_layers,
            "layer_types": _types_of(model),
        }

    switches = () if switch is None else (switch,)
    return Setting((*switches, "sliding_window", "max_window_layers", "layer_types"), read, write)


def rotated_layers() -> Setting:
    """Return the layers that are not rotated: every fourth, unless the file lists a 1 for each one that is."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        file.expect("use_sliding_window", (False,), False)
        if any(_layer_types(file, fields) or ()):
            raise ConfigError(f"{file.where} has layer_types with a window, and use_sliding_window false: correct it")
        every = file.value("no_rope_layer_interval", COUNT, 4)
        rotated = file.value("no_rope_layers", BITS, None, nullable=True)
        if rotated is None:
            rotated = [int((index + 1) % every != 0) for index in range(fields["num_layers"])]
        _check_length(file, "no_rope_layers", rotated, fields["num_layers"])
        unrotated = [not each for each in rotated]
        return {"no_rope_freq": pattern_of(unrotated, unrotated)} if any(unrotated) else {}

    keys = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")
    return Setting(keys, read, lambda model: {"no_rope_layers": [int(block.rotated) for block in model.blocks]})


def delta_net_by_type() -> Setting:
    """Return the layers with a gated delta net: of a type, or without a list of types all but every Nth."""

    def read(file: SettingsFile, fields: Fields) -> Fields:
        every = file.value("full_attention_interval", COUNT, 4)
        linear = _layer_types(file, fields, _LINEAR) or [(i + 1) % every != 0 for i in range(fields["num_layers"])]
        pattern = pattern_of(linear, [not each for each in linear])
        found = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": pattern}
        return found if any(linear) else {}

    return Setting(("layer_types", "full_attention_interval"), read, lambda model: {"layer_types": _types_of(model)})


def pattern_of(listed: Sequence[bool], named: Sequence[bool]) -> str:
    """Return the text that flags of layers read: N for every Nth layer, or else a list of 0 and 1, `[0]*3+[1]`.

    Args:
        listed: the flag of each layer.
        named: for each layer, whether N must select it.
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


def _layer_types(file: SettingsFile, fields: Fields, named: str = _WINDOW) -> list[bool] | None:
    """Return for each layer whether it is of a type, and not whole attention; None if the file lists no types."""
    types = file.value("layer_types", WORDS, None, nullable=True)
    if types is None:
        return None
    for each in types:
        if each not in (named, _WHOLE):
            raise ConfigError(
                f"{file.where} has a layer of {each}, and our models have {_WHOLE} and {named}: this model cannot be "
                "trained here"
            )
    _check_length(file, "layer_types", types, fields["num_layers"])
    return [each == named for each in types]


def _types_of(model: ModelConfig) -> list[str]:
    return [_LINEAR if block.recurrence else _WHOLE if block.window is None else _WINDOW for block in model.blocks]


def _check_length(file: SettingsFile, key: str, listed: Sequence[Any], layers: int) -> None:
    if len(listed) != layers:
        raise ConfigError(f"{file.where} lists {len(listed)} layers in {key}, and has {layers}: get the file again")
