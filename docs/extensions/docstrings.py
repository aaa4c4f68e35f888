"""Docstrings as this project writes them, made into the markup that Sphinx reads.

They have Markdown's indented blocks of code, and backticks with an ending behind them, as in `LayerSpec`s.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_CODE = re.compile(r"(?<!`)(`[^`\n]+`)([a-z]?)")
"""Code in a line, and the first letter of an ending behind it."""


def as_markup(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with its code blocks marked, before its sections are read.

    Args:
        lines: of the docstring, without its common indentation.
    """
    found: list[str] = []
    in_code = False
    before = ""  # the last line with text
    for line in lines:
        if line.strip():
            indented = line.startswith("    ")
            if indented and not in_code and found and not found[-1].strip() and not before.startswith(" "):
                found += ["::", ""]
                in_code = True
            in_code = in_code and indented
            before = line
        found.append(line if in_code else _CODE.sub(lambda code: r"\ ".join(filter(None, code.groups())), line))
    return found


def process(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Replace the lines of a docstring.

    Args:
        app: unused.
        what: unused.
        name: unused.
        thing: unused.
        options: unused.
        lines: of the docstring; changed in place.
    """
    lines[:] = as_markup(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding what reads docstrings."""
    app.connect("autodoc-process-docstring", process, priority=400)  # napoleon, which reads the sections, has 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
