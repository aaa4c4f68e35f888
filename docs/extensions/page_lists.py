"""Tables of contents that are plain Markdown: a comment says which links, or which files, are the pages below a page.

    <!-- pages -->
    - [Schedules](concepts/schedules.md): how pipelines are filled

The links of the list that follows are the entries, in their order; the heading above is their caption in the sidebar.
The list stays what it is.

    <!-- pages: [0-9]*.md -->

The files with these names are the entries, in the order of their names, and are listed there. A code host shows neither
comment.
"""

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_COMMENT = re.compile(r"<!-- pages(?:: (?P<pattern>\S+))? -->\s*")
_logger = logging.getLogger(__name__)


def matching_pages(pattern: str, folder: str, pages: set[str]) -> list[str]:
    """Return the pages whose file names match, in the order of their names.

    Args:
        pattern: names of Markdown files, relative to `folder`; `*` does not cross folders.
        folder: folder of the page that lists them, relative to the source directory.
        pages: names of all pages, without `.md`.
    """
    parent, name = posixpath.split(posixpath.join(folder, pattern.removesuffix(".md")))
    return sorted(
        page for page in pages if posixpath.dirname(page) == parent and fnmatchcase(posixpath.basename(page), name)
    )


class PageLists(SphinxTransform):
    """Replaces each comment by the table of contents that it asks for."""

    default_priority = 100

    def apply(self, **kwargs: Any) -> None:
        """Put the toctrees of a page in their places."""
        for comment in list(self.document.findall(nodes.raw)):
            if match := _COMMENT.fullmatch(comment.astext()):
                self._replace(comment, match["pattern"])

    def _replace(self, comment: nodes.raw, pattern: str | None) -> None:
        page = self.env.docname
        folder = posixpath.dirname(page)
        if pattern is None:
            following = comment.next_node(descend=False, siblings=True)
            links = list(_linked_pages(following)) if isinstance(following, nodes.bullet_list) else []
            if links:
                following["classes"].append("pages")
        else:
            links = matching_pages(pattern, folder, self.env.found_docs - {page})
            self.env.glob_toctrees.add(page)  # read again when pages come or go
        if not links:
            _logger.warning(
                "no page follows this comment: name files, or list links to pages below it", location=comment
            )
        heading = comment.parent.next_node(nodes.title) if isinstance(comment.parent, nodes.section) else None
        caption = heading.astext() if heading is not None and pattern is None else None
        toctree = addnodes.toctree(
            "",
            parent=page,
            entries=[(None, link) for link in links],
            includefiles=links,
            maxdepth=-1,
            caption=caption,
            rawcaption=caption or "",
            glob=False,
            hidden=pattern is None,
            includehidden=False,
            numbered=0,
            titlesonly=True,
            rawentries=[],
        )
        wrapper = nodes.compound("", toctree, classes=["toctree-wrapper"])
        comment.replace_self(wrapper)


def _linked_pages(links: nodes.bullet_list) -> Iterator[str]:
    """Yield the page to which the first link of each item leads."""
    for item in links:
        reference = item.next_node(addnodes.pending_xref)
        if reference is not None and reference.get("refdomain") == "doc":
            yield reference["reftarget"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the tables of contents."""
    app.add_transform(PageLists)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
