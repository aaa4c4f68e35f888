"""Texts of times, sizes and numbers, and of a strategy in a line."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_terapipe.dimensions import ordered_for
from megatron_terapipe.strategy import DIMENSIONS, Strategy


def time_text(seconds: float) -> str:
    """Return seconds as text with three significant digits."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        # From 999.5 ms on, three digits are 1 s.
        if seconds * scale >= 0.9995 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    raise AssertionError


def bytes_text(num_bytes: float) -> str:
    """Return bytes as text, in units of powers of 1000, as data sheets count them."""
    return _scaled(num_bytes, (1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))


def count_text(number: float) -> str:
    """Return a large number as short text: `12.9 B`."""
    return _scaled(number, (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (1.0, ""))


def _scaled(number: float, *units: tuple[float, str]) -> str:
    # From 999.5 M on, three digits are 1 B.
    scale, unit = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    return f"{number / scale:.3g}{unit}"


def bandwidth_text(bytes_per_s: float) -> str:
    """Return a bandwidth of a network, in bits."""
    gbits = 8e-9 * bytes_per_s
    return f"{gbits:,.0f} Gbit/s" if gbits >= 10 else f"{gbits:.2g} Gbit/s"


def numbers_text(numbers: Sequence[int]) -> str:
    """Return a list of whole numbers as text: `2 x 704, 640` where numbers repeat, `0 to 7` where they count on."""
    texts: list[str] = []
    start = 0
    while start < len(numbers):
        same, rising = 1, 1
        while numbers[start + same : start + same + 1] == numbers[start : start + 1]:
            same += 1
        while list(numbers[start + rising : start + rising + 1]) == [numbers[start] + rising]:
            rising += 1
        if rising > 3:
            texts.append(f"{numbers[start]} to {numbers[start] + rising - 1}")
        else:
            texts.append(f"{same} x {numbers[start]}" if same > 1 else str(numbers[start]))
        start += rising if rising > 3 else same
    return ", ".join(texts)


def strategy_text(strategy: Strategy | Mapping[str, Any]) -> str:
    """Return a strategy, or its JSON, in one line without usual values: `dp 4 · tp 8 · pp 2 · micro-batch 1 · 1f1b`."""
    if not isinstance(strategy, Strategy):
        strategy = Strategy.from_json(strategy)
    parts = [
        template.format(getattr(strategy, each.name))
        for each, template in ordered_for(DIMENSIONS, "phrase")
        if each.always or getattr(strategy, each.name) != each.default
    ]
    return " · ".join(parts)


def difference_text(strategy: Strategy, other: Strategy) -> str:
    """Return the settings in which a strategy differs from another: `tp 8 · pp 4 · 3 token slices`."""
    parts = [
        template.format(getattr(strategy, each.name))
        for each, template in ordered_for(DIMENSIONS, "phrase")
        if getattr(strategy, each.name) != getattr(other, each.name) and "{}" in template
    ]
    return " · ".join(parts) or "the same with other settings"


def layout_text(strategy: Strategy) -> str:
    """Return the sizes of a strategy above 1 in a few words: `tp 4, pp 8, 6 slices`."""
    sizes = [
        template.format(getattr(strategy, each.name))
        for each, template in ordered_for(DIMENSIONS, "phrase")
        if (each.ranks or each.name == "expert_parallel_size") and getattr(strategy, each.name) > 1
    ]
    sizes += [f"{strategy.num_token_slices} slices"] if strategy.num_token_slices > 1 else []
    return ", ".join(sizes) or "one device"
