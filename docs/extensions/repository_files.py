"""Links from pages to files and folders of the repository that are no pages.

A link such as `[the generators](../deepspeed_ext/plan/schedules.py)` leads to the file on the code host if its address
is known (`repository_url`), otherwise to a highlighted copy of it in the site. A link to a folder leads to its page,
`README.md`, or to a list of its files.
"""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.domains import Domain
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

_FOLDER = "source"
"""Folder of the site with the copies of files."""


class RepositoryFiles(Domain):
    """The files that pages link to, and the addresses that they have."""

    name = "repository"
    label = "Files of the repository"
    initial_data: ClassVar[dict[str, Any]] = {"linked": {}}

    def note(self, page: str, path: str) -> None:
        """Remember that a page links to a file or folder.

        Args:
            page: name of the page.
            path: path from the root of the repository.
        """
        self.data["linked"].setdefault(page, set()).add(path)

    def linked(self) -> list[str]:
        """Return the paths of all files and folders that pages link to, sorted."""
        return sorted(set().union(*self.data["linked"].values()))

    def clear_doc(self, docname: str) -> None:
        """Forget the links of a page."""
        self.data["linked"].pop(docname, None)

    def merge_domaindata(self, docnames: set[str], otherdata: dict[str, Any]) -> None:
        """Take over the links of the pages that another process has read.

        Args:
            docnames: the pages.
            otherdata: what that process remembers.
        """
        self.data["linked"].update({page: paths for page, paths in otherdata["linked"].items() if page in docnames})

    def resolve_xref(
        self,
        env: BuildEnvironment,
        fromdocname: str,
        builder: Builder,
        typ: str,
        target: str,
        node: addnodes.pending_xref,
        contnode: nodes.Element,
    ) -> nodes.reference:
        """Return the link to a file.

        Args:
            env: unused.
            fromdocname: the page with the link.
            builder: knows how addresses are made.
            typ: unused; there is one kind of links.
            target: path from the root of the repository.
            node: unused.
            contnode: words of the link.
        """
        url = env.config.repository_url
        address = f"{url}/blob/HEAD/{target}" if url else builder.get_relative_uri(fromdocname, f"{_FOLDER}/{target}")
        return nodes.reference("", "", contnode, refuri=address, internal=not url)

    def resolve_any_xref(self, *_: object) -> list[tuple[str, nodes.reference]]:
        """Return nothing: paths are no names that pages refer to without a link."""
        return []


class LinksToFiles(SphinxTransform):
    """Turns MyST's downloads of source files, and its links to folders, into references to files of the repository."""

    default_priority = 10

    def apply(self, **kwargs: Any) -> None:
        """Replace the links of one page."""
        for link in list(self.document.findall(addnodes.download_reference)):
            self._replace(link, link["reftarget"])
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link["reftype"] == "myst" and not link.get("refdomain"):
                self._replace(link, link["reftarget"])

    def _replace(self, link: nodes.Element, target: str) -> None:
        relative, absolute = self.env.relfn2path(target, self.env.docname)
        page = posixpath.join(relative, "README")
        if page in self.env.found_docs:
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, None
        elif Path(absolute).exists():
            self.env.domains["repository"].note(self.env.docname, relative)
            reference = addnodes.pending_xref(
                "",
                *link.children,
                refdomain="repository",
                reftype="file",
                reftarget=relative,
                refexplicit=True,
                refwarn=True,
            )
            link.replace_self(reference)


def highlighted(text: str, name: str) -> str:
    """Return the HTML of a source file, with a numbered anchor `L1`, `L2`, ... on each line.

    Args:
        text: the file.
        name: its name, which tells its language.
    """
    try:
        lexer = get_lexer_for_filename(name, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return highlight(
        text, lexer, HtmlFormatter(linenos="inline", anchorlinenos=True, lineanchors="L", cssclass="highlight")
    )


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the page of each file and folder that pages link to: name, what its template shows, template.

    Args:
        app: the application that has read all pages.
    """
    if app.config.repository_url:
        return
    waiting, seen = app.env.domains["repository"].linked(), set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        file = Path(app.srcdir, path)
        if file.is_dir():
            below = [each for each in sorted(file.iterdir()) if not each.name.startswith((".", "__"))]
            waiting += [f"{path}/{each.name}" for each in below]
            links = "".join(f'<li><a href="{file.name}/{each.name}.html">{each.name}</a></li>' for each in below)
            body = f'<ul class="files">{links}</ul>'
        else:
            body = highlighted(file.read_text(encoding="utf-8"), file.name)
        yield f"{_FOLDER}/{path}", {"title": path, "body": f"<h1>{path}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Return that pages may be read and written in parallel, after adding the links to files."""
    app.add_config_value("repository_url", "", "env", types=(str,))
    app.add_domain(RepositoryFiles)
    app.add_transform(LinksToFiles)
    app.connect("html-collect-pages", source_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
