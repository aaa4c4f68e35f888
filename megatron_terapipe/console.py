"""The console on which commands print their tables."""

import os
import re
import textwrap
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from deepspeed_ext.plan.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table

WIDTH_OF_FILES = 100
"""Columns of a line where standard output is a file or a pipe, unless COLUMNS is set."""


def output_console(**settings: Any) -> "Console":
    """Return the console of standard output: as wide as its terminal, else as COLUMNS or `WIDTH_OF_FILES`."""
    from rich.console import Console

    class PrintableConsole(Console):
        """Writes the codes of its styles, and no others."""

        def render(self, *what: Any, **how: Any) -> Iterator["Segment"]:
            for each in super().render(*what, **how):
                yield each if each.control else each._replace(text=printable(each.text))

    console = PrintableConsole(**settings)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return PrintableConsole(width=WIDTH_OF_FILES, **settings)


def plain_table(names: Iterable[str], left: Container[str] = ()) -> "Table":
    """Return an empty table with a line below its head; columns in `left` are aligned there, others on the right."""
    import rich.box
    from rich.table import Table

    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


_KEPT_SPACE = re.compile(r"(?<=[\d%]) (?=[\w(])|(?<=[\w:]) (?=[-+]?\d)| (?=·|of \d)|(?<=\(best) ")
"""Space between a number and its unit or name, before the point between two settings, or in "(best published: 70%)"."""


def print_text(console: "Console", text: str, *, indent: str = "") -> None:
    """Print text on lines of the width of a console, without a break in a value or between a flag and its value.

    Args:
        indent: before each line but the first.
    """
    kept = re.sub(r"(--[\w-]+) (?=[\w.])", "\\1\u00a0", _KEPT_SPACE.sub("\u00a0", text))
    lines = textwrap.wrap(kept, console.width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    for line in lines:
        console.print(line.replace("\u00a0", " "), markup=False, highlight=False, soft_wrap=True)
