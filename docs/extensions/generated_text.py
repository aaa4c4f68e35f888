"""Text of a page that is printed from the code when the site is built, in the place of a comment.

    <!-- generated: flags -->

The repository has the page without that text, so it cannot be out of date; links to the page lead somewhere in both.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from sphinx.application import Sphinx

from docs.extensions import commands_page, flags_page

PRINTERS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"flags": flags_page.markdown, "commands": commands_page.markdown}
)
"""Function that returns the Markdown, by the name in the comment."""
_COMMENT = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def replace_comments(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the comments in the text of a page, which is the only item of `source`."""
    if _COMMENT.search(source[0]):
        source[0] = _COMMENT.sub(lambda found: PRINTERS[found[1]](), source[0])
        app.env.note_reread()  # the page depends on code that Sphinx does not watch


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the step."""
    app.connect("source-read", replace_comments)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
