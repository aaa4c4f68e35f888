"""The time axis of SVG pictures: where a time stands, and the round times that are marked."""

from collections.abc import Iterator
from math import floor, log10
from typing import NamedTuple

from deepspeed_ext.plan.render.svg_elements import GRID, SOFT, text

PLOT_LEFT = 100
_RIGHT_MARGIN = 100
"""Width of the column with the peaks."""


class Scale(NamedTuple):
    """From time since the first op to pixels, in a picture of some width."""

    makespan: float
    width: float

    @property
    def plot_right(self) -> float:
        """Where the last op of the longest timeline ends."""
        return self.width - _RIGHT_MARGIN

    def x(self, time: float) -> float:
        """Pixels from the left edge."""
        return PLOT_LEFT + (time / self.makespan if self.makespan else 0.0) * (self.plot_right - PLOT_LEFT)


def grid(scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """Return lines at round times."""
    for time in round_times(scale.makespan):
        yield f'<path d="M{scale.x(time):.5g},{top - 6:.5g} V{bottom + 6:.5g}" {GRID}/>'


def axis(scale: Scale, unit: str, bottom: float) -> Iterator[str]:
    """Return the numbers of the grid lines."""
    for time in round_times(scale.makespan):
        yield text(scale.x(time), bottom + 21, f"{time:g}", f'{SOFT} font-size="11" text-anchor="middle"')
    name = f"time ({unit})" if unit else "time"
    yield text(scale.plot_right + 36, bottom + 21, name, f'{SOFT} font-size="11" text-anchor="middle"')


def round_times(makespan: float) -> list[float]:
    """About ten multiples of 1, 2 or 5 times a power of ten, from 0 on."""
    if makespan <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(makespan / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if makespan / (factor * power) <= 12)
    return [index * step for index in range(floor(makespan / step + 1e-9) + 1)]
