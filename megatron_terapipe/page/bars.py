"""Bars of report pages, on one scale, and the colours of their parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from deepspeed_ext.plan.render.palette import oklch_to_hex

_HUES = (255, 150, 25, 80, 310, 200, 350, 115, 60, 285, 175, 5)
_LIGHTNESS = (0.72, 0.80, 0.70, 0.86, 0.66, 0.82, 0.62, 0.76, 0.64, 0.84, 0.60, 0.88)
"""Neighbours differ in lightness as well as in hue, so that they are told apart without colour vision."""

_SHORTEST = 0.0005
"""Shares below this cannot be seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a chart."""

    label: str
    """What it is of, as text."""
    parts: Mapping[str, float]
    """Amount of each part by its name."""
    figure: str
    limit: float | None = None
    """Where a line marks what there is room for; None = no line."""


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each part, the same in all charts."""
    return {
        name: oklch_to_hex(_LIGHTNESS[index % len(_LIGHTNESS)], 0.11, _HUES[index % len(_HUES)])
        for index, name in enumerate(names)
    }


def legend(names: Sequence[str], palette: Mapping[str, str]) -> str:
    """Return the legend of a chart."""
    entries = "".join(
        f'<span class="entry"><i style="background:{palette[name]}"></i>{escape(name)}</span>' for name in names
    )
    return f'<div class="legend">{entries}</div>'


def stacked_bars(bars: Sequence[Bar], palette: Mapping[str, str], written: Mapping[int, Mapping[str, str]]) -> str:
    """Return bars on one scale, below each other.

    Args:
        written: by bar and part, the amount as it is shown to who points at it.
    """
    longest = max((max(sum(bar.parts.values()), bar.limit or 0.0) for bar in bars), default=0.0) or 1.0
    rows = []
    for index, bar in enumerate(bars):
        pieces = "".join(
            f'<span style="width:{100 * amount / longest:.3f}%;background:{palette[name]}" '
            f'title="{escape(f"{name}: {written[index][name]}", quote=True)}"></span>'
            for name, amount in bar.parts.items()
            if amount / longest > _SHORTEST
        )
        mark = ""
        if bar.limit is not None:
            mark = f'<b class="limit" style="left:{100 * bar.limit / longest:.3f}%" title="what the device has"></b>'
        label = f'<div class="label" title="{escape(bar.label, quote=True)}">{escape(bar.label)}</div>'
        rows.append(
            f'<div class="row">{label}<div class="track">{pieces}{mark}</div>'
            f'<div class="figure">{escape(bar.figure)}</div></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


MEMORY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "key_values": "keys and values",
    "logits": "logits",
    "buffers": "buffers",
    "framework": "framework",
}
"""Parts of memory in words."""
