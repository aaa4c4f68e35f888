"""The legend of SVG pictures, and the figures beside their title."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.render.copies import LANES
from deepspeed_ext.plan.render.labels import KIND_NAMES
from deepspeed_ext.plan.render.palette import op_colour
from deepspeed_ext.plan.render.svg_axis import PLOT_LEFT
from deepspeed_ext.plan.render.svg_elements import (
    CENTRED,
    INK,
    LABEL,
    MARGIN,
    MIDDLE,
    REDUCTION,
    SOFT,
    TRACK,
    rect,
    text,
    text_width,
)
from deepspeed_ext.plan.render.svg_lanes import COPY_FILLS, bar
from deepspeed_ext.plan.render.svg_rows import stripe, swatch

_MAX_MICRO_BATCHES = 8
_CHIP, _SWATCH, _LINE, _GAP = 18, 30, 28, 18
_LETTER = 6.6
"""Width of a letter of a name, in pixels."""


class Legend(NamedTuple):
    """A legend that is laid out."""

    body: list[str]
    height: float
    """Of its lines but the first."""


class _Entry(NamedTuple):
    """Entry of the legend for one mark."""

    width: float
    draw: Callable[[float, float], Iterator[str]]
    """Called with the left edge and the middle."""


def legend(
    shape: PipelineShape,
    kinds: Sequence[OpKind],
    width: float,
    y: float,
    *,
    reduces: bool = False,
    copies: bool = False,
) -> Legend:
    """Return the meaning of hue, lightness, height and textures, on as many lines as the width needs.

    Args:
        y: base line of the first line.
        reduces: whether the picture shows reductions.
        copies: whether it shows copies to the host and back.
    """
    body: list[str] = []
    x: float = PLOT_LEFT
    first = y
    for entry in _entries(shape, kinds, reduces, copies):
        if x > PLOT_LEFT and x + entry.width > width - MARGIN:
            x, y = PLOT_LEFT, y + _LINE
        body += entry.draw(x, y)
        x += entry.width + _GAP
    return Legend(body, y - first)


def _entries(shape: PipelineShape, kinds: Sequence[OpKind], reduces: bool, copies: bool) -> Iterator[_Entry]:
    shown = min(shape.num_micro_batches, _MAX_MICRO_BATCHES)
    chips = [(op_colour(micro_batch, 0, 1), str(micro_batch)) for micro_batch in range(shown)]
    yield _chips("micro-batch", chips, goes_on=shown < shape.num_micro_batches)
    if shape.num_token_slices > 1:
        yield _chips("token slice", _token_slice_chips(shape), goes_on=False)
    neutral = op_colour(0, 0, 1)
    for kind in kinds:
        yield _swatch(KIND_NAMES[kind], partial(_op, kind, neutral))
    if shape.num_model_chunks > 1:
        last = shape.num_model_chunks - 1
        yield _swatch(f"model chunk {last}", partial(_striped, neutral, last))
    if copies:
        for lane, fill in zip(LANES, COPY_FILLS, strict=True):
            yield _swatch(f"copy {lane}", partial(_bar, fill))
    if reduces:
        yield _swatch("gradient reduction", partial(_bar, REDUCTION))
    yield _swatch("idle", lambda x, y: iter([rect(x, y, _SWATCH, _CHIP, f'rx="3" {TRACK}')]))


def _chips(name: str, chips: Sequence[tuple[str, str]], *, goes_on: bool) -> _Entry:
    """Coloured chips with their numbers, after their name."""
    left = len(name) * _LETTER + 8

    def draw(x: float, y: float) -> Iterator[str]:
        yield text(x, y, name, f'{SOFT} font-size="12" {MIDDLE}')
        for number, (fill, label) in enumerate(chips):
            at = x + left + 26 * number
            yield rect(at, y - _CHIP / 2, 24, _CHIP, f'rx="3" fill="{fill}"')
            yield text(at + 12, y, label, f'{LABEL} font-size="11" {CENTRED}')
        if goes_on:
            yield text(x + left + 26 * len(chips) + 4, y, "…", f'{SOFT} font-size="12" {MIDDLE}')

    return _Entry(left + 26 * len(chips) + (16 if goes_on else 0), draw)


def _swatch(name: str, mark: Callable[[float, float], Iterator[str]]) -> _Entry:
    """A mark before its name."""

    def draw(x: float, y: float) -> Iterator[str]:
        yield from mark(x, y - _CHIP / 2)
        yield text(x + _SWATCH + 8, y, name, f'{SOFT} font-size="12" {MIDDLE}')

    return _Entry(_SWATCH + 8 + len(name) * _LETTER, draw)


def _op(kind: OpKind, fill: str, x: float, y: float) -> Iterator[str]:
    return swatch(kind, x, y, _SWATCH, _CHIP, fill)


def _bar(fill: str, x: float, y: float) -> Iterator[str]:
    yield bar(x, y + _CHIP / 2 - 3, _SWATCH, fill)


def _striped(fill: str, last: int, x: float, y: float) -> Iterator[str]:
    yield from swatch(OpKind.FORWARD, x, y, _SWATCH, _CHIP, fill)
    yield from stripe(last, last + 1, x, y, _SWATCH, _CHIP)


def facts(figures: Sequence[tuple[str, str]], width: float, y: float) -> Iterator[str]:
    """Return figures for the upper right corner, each over its name."""
    x: float = width - MARGIN
    for name, value in reversed(figures):
        yield text(x, y - 4, value, f'{INK} font-size="18" font-weight="600" text-anchor="end"')
        yield text(x, y + 14, name, f'{SOFT} font-size="11" text-anchor="end"')
        x -= max(11 * text_width(name), 18 * text_width(value)) + 20


def _token_slice_chips(shape: PipelineShape) -> list[tuple[str, str]]:
    """As many steps of lightness as the eye tells apart; between first and last they stand for several each."""
    steps = min(shape.num_token_slices, 5)
    labels = [str(step) if step < steps - 1 else str(shape.last_token_slice) for step in range(steps)]
    if steps < shape.num_token_slices:
        labels[1:-1] = [""] * (steps - 2)
    return [(op_colour(0, step, steps), label) for step, label in enumerate(labels)]
