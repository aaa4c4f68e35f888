"""Warns of what the built site would load from another host: fonts, scripts, styles, pictures."""

import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

_IN_PAGES = re.compile(
    r"""<(?:script|img|iframe|source|video|link(?=[^>]*\brel="(?:stylesheet|preload|preconnect|icon)"))\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"""
)
_IN_STYLES = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]+)""")
_logger = logging.getLogger(__name__)


def loaded_from_elsewhere(text: str) -> list[str]:
    """Return the addresses on other hosts that a page or a style loads; links that a reader follows are none.

    Args:
        text: the HTML or the CSS.
    """
    return [*_IN_PAGES.findall(text), *_IN_STYLES.findall(text)]


def _texts(site: Path) -> Iterator[Path]:
    yield from site.rglob("*.html")
    yield from site.rglob("*.css")


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of what the site that was built loads from elsewhere.

    Args:
        app: the application, when it has built.
        exception: why it did not, None if it did.
    """
    if exception is not None or app.builder.format != "html":
        return
    for path in sorted(_texts(Path(app.outdir))):
        for address in loaded_from_elsewhere(path.read_text(encoding="utf-8")):
            _logger.warning("%s is loaded from another host: the site works offline", address, location=str(path))


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the check."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
