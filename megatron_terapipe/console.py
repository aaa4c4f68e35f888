"""The console on which commands print their tables."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deepspeed_ext.plan.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

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
