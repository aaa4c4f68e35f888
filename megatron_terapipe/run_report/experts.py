"""Loads of experts as pictures: layers x experts, and layers x time."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, inf

from deepspeed_ext.plan.draw.elements import oklch_to_hex
from megatron_terapipe.page.document import legend
from megatron_terapipe.training.records import STARVED_BELOW, ExpertLoads, latest_loads, starved_text

LEVELS = (
    (STARVED_BELOW, f"load below {STARVED_BELOW:g}", oklch_to_hex(0.38, 0.13, 264)),
    (0.5, f"{STARVED_BELOW:g} to 0.5", oklch_to_hex(0.62, 0.12, 255)),
    (0.8, "0.5 to 0.8", oklch_to_hex(0.80, 0.07, 250)),
    (1.25, "0.8 to 1.25", oklch_to_hex(0.92, 0.02, 100)),
    (2.0, "1.25 to 2", oklch_to_hex(0.82, 0.09, 60)),
    (4.0, "2 to 4", oklch_to_hex(0.68, 0.15, 42)),
    (inf, "4 or more", oklch_to_hex(0.50, 0.16, 28)),
)
"""Loads: upper bound, name and colour."""

MOST_COLUMNS = 60
"""Columns of a picture over time at most."""

_WIDTH, _ROW, _LEFT, _HEAD = 1000.0, 18.0, 70.0, 20.0
_LEAST_LABEL = 44.0
"""Pixels of a label of a column, at least."""


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], loads: Sequence[Sequence[float]]) -> str:
    """Return a table of loads as a titled SVG picture; a cell has its row, column and load under the pointer.

    Args:
        loads: by row and column.
    """
    width = (_WIDTH - _LEFT) / len(columns)
    every = 1 << (ceil(_LEAST_LABEL / width) - 1).bit_length()

    def elements() -> Iterator[str]:
        for column in range(0, len(columns), every):
            x = _LEFT + (column + 0.5) * width
            yield f'<text class="soft" x="{x:.1f}" y="{_HEAD - 6}" text-anchor="middle">{columns[column]}</text>'
        for row, (name, of_row) in enumerate(zip(rows, loads, strict=True)):
            y = _HEAD + row * _ROW
            yield f'<text class="soft" x="{_LEFT - 8}" y="{y + _ROW - 5:.0f}" text-anchor="end">{name}</text>'
            for column, (of_column, load) in enumerate(zip(columns, of_row, strict=True)):
                colour = next(colour for bound, _, colour in LEVELS if load < bound or bound == inf)
                yield (
                    f'<rect x="{_LEFT + column * width:.2f}" y="{y:.0f}" width="{width:.2f}" height="{_ROW - 1:.0f}" '
                    f'fill="{colour}"><title>{name}, {of_column}: {load:.2f}</title></rect>'
                )

    height = _HEAD + _ROW * len(rows)
    return (
        f'<p>{title}</p><svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{title}" font-size="11">{"".join(elements())}</svg>'
    )


def in_columns(lines: Sequence[ExpertLoads]) -> list[ExpertLoads]:
    """Return means of consecutive lines of the last line's layers and experts, `MOST_COLUMNS` at most."""
    last = lines[-1]
    alike = [each for each in lines if (each.layers, each.num_experts) == (last.layers, last.num_experts)]
    together = ceil(len(alike) / MOST_COLUMNS)
    return [ExpertLoads.mean(alike[start : start + together]) for start in range(0, len(alike), together)]


def expert_pictures(lines: Sequence[ExpertLoads]) -> str:
    """Return the loads of experts as HTML: of the last iterations, and of the busiest and least busy over time.

    Args:
        lines: in the order of iterations; the result is empty without any.
    """
    latest = latest_loads(lines)
    if latest is None:
        return ""
    rows, columns = [f"layer {layer}" for layer in latest.layers], in_columns(lines)

    def over_time(name: str, choose: Callable[[Sequence[float]], float]) -> str:
        loads = [[choose(each.loads[row]) for each in columns] for row in range(len(rows))]
        names = [f"{'iteration ' if column == 0 else ''}{each.iteration}" for column, each in enumerate(columns)]
        return heat_map(f"{name} expert of each layer, over iterations", rows, names, loads)

    starved = f"<p>{escape(starved_text(latest))}</p>" if latest.starved else ""
    note = (
        "The load of an expert is the number of its tokens over its even share: 1 is balanced. A column over "
        "iterations is the mean of those up to the given one."
    )
    palette = {name: colour for _, name, colour in LEVELS}
    experts = [f"{'expert ' if expert == 0 else ''}{expert}" for expert in range(latest.num_experts)]
    last = f"means of iterations {latest.iteration - latest.iterations + 1} to {latest.iteration}"
    return (
        f'<p class="sub">{note}</p>{starved}{legend(list(palette), palette)}'
        f"{heat_map(last, rows, experts, latest.loads)}"
        f"{over_time('busiest', max)}{over_time('least busy', min)}"
    )
