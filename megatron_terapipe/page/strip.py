"""Marks on the axis of iterations, a row for each kind, as HTML: what happened, and when."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from megatron_terapipe.page.axes import Axis, value_text

_NUMBERS = 6
"""Iterations that are written below the rows."""


def strip(rows: Mapping[str, Sequence[tuple[float, str]]], first: float, last: float) -> str:
    """Return a row of marks for each kind.

    Args:
        rows: by kind, places of marks and what they are.
        first: first iteration.
        last: last iteration.
    """
    axis = Axis(first, max(last, first + 1), 0.0, 100.0)
    return f'<div class="strip">{"".join(_rows(rows, axis))}</div>'


def _rows(rows: Mapping[str, Sequence[tuple[float, str]]], axis: Axis) -> Iterator[str]:
    for name, marks in rows.items():
        # Of marks that lie on each other, one is enough.
        places = {f"{axis.at(place):.1f}": words for place, words in marks}
        ticks = "".join(
            f'<b style="left:{place}%" title="{escape(words, quote=True)}"></b>' for place, words in places.items()
        )
        yield f'<div class="row"><div class="label">{escape(name)}</div><div class="track">{ticks}</div></div>'
    values = [axis.low, *(value for value in axis.round_values(_NUMBERS) if 6 < axis.at(value) < 94), axis.high]
    kinds = ["first", *[""] * (len(values) - 2), "last"]
    numbers = "".join(
        f'<span class="{kind}" style="left:{axis.at(value):.1f}%">{value_text(value)}</span>'
        for kind, value in zip(kinds, values, strict=True)
    )
    yield f'<div class="row axis"><div class="label">iteration</div><div class="track">{numbers}</div></div>'
