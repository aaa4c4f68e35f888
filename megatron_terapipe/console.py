"""The console on which commands print their tables."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deepspeed_ext.plan.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

WIDTH_OF_FILES = 1000
"""Columns of a line where standard output is a file or a pipe: no cell of a table is broken there."""


def output_console(**settings: Any) -> "Console":
    """Return the console of standard output: as wide as its terminal, or wide enough for any table without one.

    Args:
        settings: further ones of `rich.console.Console`.
    """
    from rich.console import Console

    class PrintableConsole(Console):
        """Writes the codes of its styles, and no others."""

        def render(self, *what: Any, **how: Any) -> Iterator["Segment"]:
            for each in super().render(*what, **how):
                yield each if each.control else each._replace(text=printable(each.text))

    console = PrintableConsole(**settings)
    return console if console.is_terminal else PrintableConsole(width=WIDTH_OF_FILES, **settings)
