"""The axes of charts: round values, their texts, and where they stand."""

from dataclasses import dataclass
from math import ceil, floor, inf, log10


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False
    """Whether factors are equally long, not differences."""

    def at(self, value: float) -> float:
        """Return the pixel of a value; what is beyond an end stands at that end."""
        share = (self._place(value) - self._place(self.low)) / (self._place(self.high) - self._place(self.low))
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def round_values(self, most: int) -> list[float]:
        """Return values to mark, some `most` of them."""
        if self.logarithmic:
            powers = range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)
            if len(powers) > 2:
                return [10.0**power for power in powers[:: ceil(len(powers) / most)]]
            around = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            values = [factor * 10.0**power for power in around for factor in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        return round_values(self.low, self.high, most)

    def _place(self, value: float) -> float:
        return log10(max(value, 1e-300)) if self.logarithmic else value


def round_values(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten in a range."""
    power = 10.0 ** floor(log10((high - low) / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if (high - low) / (factor * power) <= most)
    return [index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def value_text(value: float) -> str:
    """Return a value as axes show it: `0.25`, `12k`, `1.5M`, `3e-05`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def padded(low: float, high: float, *, from_zero: bool = False) -> tuple[float, float]:
    """Return a range with room above and below.

    Args:
        from_zero: whether it begins at 0.
    """
    if low == inf:
        return 0.0, 1.0
    if from_zero:
        return 0.0, high * 1.08 or 1.0
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room
