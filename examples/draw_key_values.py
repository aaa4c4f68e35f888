"""Draws the picture of docs/concepts/keys-and-values.md, the keys and values that each op uses, into the given file."""

import sys
from collections.abc import Iterator
from pathlib import Path

from deepspeed_ext.plan.draw.elements import (
    CENTRED,
    HATCHED,
    INK,
    LABEL,
    MARGIN,
    MIDDLE,
    SOFT,
    TRACK,
    document,
    op_colour,
    rect,
    text,
)

TOKEN_SLICES = 4
WIDTH, HEIGHT, GUTTER, TOP, GAP = 84, 38, 104, 96, 3


def panel(left: float, title: str, *, backward: bool) -> Iterator[str]:
    """Yield one panel: a row for each op from top to bottom in time, a column for the keys and values of each part.

    Args:
        backward: whether ops are backwards, last token slice first.
    """
    yield text(left, 44, title, f'{INK} font-size="16" font-weight="600"')
    plot = left + GUTTER
    for column in range(TOKEN_SLICES):
        name = f"dK{column} dV{column}" if backward else f"K{column} V{column}"
        yield text(plot + column * WIDTH + WIDTH / 2, TOP - 16, name, f'{INK} font-size="13" {CENTRED}')
    order = reversed(range(TOKEN_SLICES)) if backward else range(TOKEN_SLICES)
    for row, token_slice in enumerate(order):
        y = TOP + row * HEIGHT
        name = f"{'B' if backward else 'F'}0.{token_slice}"
        yield text(plot - 14, y + HEIGHT / 2, name, f'{INK} font-size="13" text-anchor="end" {MIDDLE}')
        for column in range(TOKEN_SLICES):
            x, size = plot + column * WIDTH, (WIDTH - GAP, HEIGHT - GAP)
            yield rect(x, y, *size, f'rx="3" {TRACK}')
            if column > token_slice:
                continue
            colour = op_colour(0, column, TOKEN_SLICES)
            yield rect(x, y, *size, f'rx="3" fill="{colour}"')
            if backward:
                yield rect(x, y, *size, f'rx="3" {HATCHED}')
            said = ("complete" if backward else "write") if column == token_slice else ("add" if backward else "read")
            weight = ' font-weight="600"' if column == token_slice else ""
            yield text(x + size[0] / 2, y + size[1] / 2, said, f'{LABEL} font-size="12"{weight} {CENTRED}')
    middle = TOP + TOKEN_SLICES * HEIGHT / 2
    yield text(left, middle, "time ↓", f'{SOFT} font-size="12" {MIDDLE}')


def picture() -> str:
    """Return the picture as SVG."""
    second = MARGIN + GUTTER + TOKEN_SLICES * WIDTH + 44
    width, height = second + GUTTER + TOKEN_SLICES * WIDTH + MARGIN, TOP + TOKEN_SLICES * HEIGHT + 56
    below = "F0.1 and B0.1 are the forward and the backward of token slice 1 of micro-batch 0, on any stage."
    body = [
        *panel(MARGIN, "Forward: keys and values are written, then read", backward=False),
        *panel(second, "Backward: gradients add up, last one first", backward=True),
        text(MARGIN, height - 24, below, f'{SOFT} font-size="12"'),
    ]
    title = "Keys and values of four token slices, and their gradients"
    said = (
        "In the forward each token slice writes its keys and values and reads all before them. In the backward "
        "each adds to the gradients of all before it, and completes its own."
    )
    return document(body, width, height, title, said)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
