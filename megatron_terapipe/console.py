"""The console on which commands print their tables."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_FILES = 1000
"""Columns of a line where standard output is a file or a pipe: no cell of a table is broken there."""


def output_console(**settings: Any) -> "Console":
    """Return the console of standard output: as wide as its terminal, or wide enough for any table without one.

    Args:
        settings: further ones of `rich.console.Console`.
    """
    from rich.console import Console

    console = Console(**settings)
    return console if console.is_terminal else Console(width=WIDTH_OF_FILES, **settings)
