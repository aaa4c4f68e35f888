"""Settings of attention: its heads, its kind in each layer, and its window."""

from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion

NOT_ATTENTION = {
    "mamba": "Mamba layers are not in this trainer",
    "rwkv": "recurrent layers are not in this trainer",
    "gmlp": "MLPs over positions are not in this trainer",
    "amlp": "MLPs over positions are not in this trainer",
}
"""Kinds of layers that do not attend, or not in this way, and the reason why they are refused."""


def convert_attention(conversion: Conversion) -> None:
    """Convert heads, kinds and windows.

    Raises:
        ConfigError: if layers do not attend, so that nothing else matters.
    """
    groups = conversion.count("num_kv_heads")
    if groups:
        conversion.flag("--num-key-value-heads", groups)
    layers = conversion.count("num_layers")
    kinds = layer_kinds(conversion.take("attention_config"), layers)
    for kind in sorted(set(kinds) - {"global", "flash"}):
        conversion.refuse(f"attention_config {kind}", NOT_ATTENTION.get(kind, "attention is global"))
    if NOT_ATTENTION.keys() & set(kinds):
        conversion.check()
    _window(conversion, kinds)


def _window(conversion: Conversion, kinds: list[str]) -> None:
    """NeoX's window counts the tokens before a token, and only its flash layers have it."""
    width = conversion.count("sliding_window_width")
    if width is None:
        return
    if conversion.settings.get("te_mha"):
        conversion.refuse(f"sliding_window_width {width}", "Transformer Engine takes two numbers", "leave te_mha out")
        return
    with_window = [int(kind == "flash") for kind in kinds]
    if not any(with_window):
        conversion.remark("sliding_window_width", "NeoX gives a window to flash layers alone, and there is none")
        return
    conversion.flag("--sliding-window", width + 1)
    if not all(with_window):
        conversion.flag("--window-attn-skip-freq", str(with_window).replace(" ", ""))


MOST_LAYERS = 10_000
"""Layers of a model at most, as in `--num-layers`."""


def layer_kinds(config: Any, num_layers: int | None) -> list[str]:
    """Return the kind of each layer.

    Args:
        config: the kinds as NeoX takes them, `[[["global", "flash"], 6]]`, or a kind for each layer; None = global.
        num_layers: layers of the model; None = not given.

    Raises:
        ConfigError: if it is written in another way, or for another number of layers.
    """
    if config is None:
        return ["global"] * (num_layers or 1)
    kinds: list[str] = []
    try:
        for entry in config:
            if isinstance(entry, str):
                kinds.append(entry)
                continue
            pattern, times = entry
            if times == "all":
                times = (num_layers or len(pattern)) // len(pattern)
            if times * max(len(pattern), 1) > MOST_LAYERS:
                raise ValueError("too many layers")
            kinds += [str(kind) for kind in pattern] * times
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(f'attention_config {config!r} is not a list such as [[["flash"], 12]]: write one') from None
    if num_layers is not None and len(kinds) != num_layers:
        raise ConfigError(
            f"attention_config describes {len(kinds)} layers and num_layers is {num_layers}: describe each layer once"
        )
    return kinds
