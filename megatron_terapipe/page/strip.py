"""Marks on the axis of iterations, a row for each kind, as SVG: what happened, and when."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from deepspeed_ext.plan.render.svg_elements import GRID, SOFT, text
from megatron_terapipe.page.axes import Axis, value_text

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 860.0, 116.0, 14.0, 22.0, 8.0


def strip_figure(rows: Mapping[str, Sequence[tuple[float, str]]], first: float, last: float) -> str:
    """Return a figure with a row of marks for each kind, as HTML.

    Args:
        rows: by kind, places of marks and what they are.
        first: first iteration.
        last: last iteration.
    """
    height = _TOP + _ROW * len(rows) + 26
    counts = ", ".join(f"{len(marks)} x {name}" for name, marks in rows.items())
    body = "".join(_elements(rows, Axis(first, max(last, first + 1), _LEFT, _WIDTH - _RIGHT)))
    return (
        f'<figure class="strip"><svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img"><title>incidents</title>'
        f"<desc>{escape(counts)}</desc>{body}</svg></figure>"
    )


def _elements(rows: Mapping[str, Sequence[tuple[float, str]]], x: Axis) -> Iterator[str]:
    bottom = _TOP + _ROW * len(rows)
    for value in x.round_values(10):
        yield f'<path d="M{x.at(value):.1f},{_TOP:.1f} V{bottom:.1f}" {GRID}/>'
        yield text(x.at(value), bottom + 16, value_text(value), f'{SOFT} font-size="11" text-anchor="middle"')
    for number, (name, marks) in enumerate(rows.items()):
        y = _TOP + _ROW * (number + 0.5)
        yield f'<path d="M{x.start:.1f},{y:.1f} H{x.end:.1f}" {GRID}/>'
        yield text(x.start - 10, y + 4, name, f'{SOFT} font-size="12" text-anchor="end"')
        # Of marks that lie on each other, one is enough.
        for place, words in {round(x.at(place)): (place, words) for place, words in marks}.values():
            yield f'<path class="tick" d="M{x.at(place):.1f},{y - 7:.1f} v14" stroke="#0969da" stroke-width="2.5">'
            yield f"<title>{escape(words)}</title></path>"
