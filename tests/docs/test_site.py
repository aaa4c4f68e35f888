"""The site of a small repository: its links, and its warnings."""

import io
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

EXTENSIONS = ["myst_parser", *(f"docs.extensions.{name}" for name in ("offline", "page_lists", "repository_files"))]
CONTENTS = """# Front

<!-- pages -->
- [One](one.md): a page, with [a heading](one.md#deep-inside)
- [Decisions](adr/README.md)
"""


def built(folder: Path, files: dict[str, str], **settings: object) -> tuple[Path, list[str]]:
    """Build a site and return its folder, and the lines of its warnings."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    warnings = io.StringIO()
    site = folder / "build"
    overrides = {
        "extensions": EXTENSIONS,
        "root_doc": "docs/index",
        "include_patterns": ["docs/**"],
        "exclude_patterns": ["build"],
        "myst_heading_anchors": 2,
        "html_theme": "basic",
        "nitpicky": True,
        **settings,
    }
    with docutils_namespace():
        Sphinx(folder, None, site, folder / "build.pages", "html", overrides, status=None, warning=warnings).build()
    lines = re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue()).replace(f"{folder}/", "").splitlines()
    return site, lines


SOUND = {
    "docs/index.md": CONTENTS,
    "docs/one.md": "# One\n\n## Deep inside\n\n[code](../code/run.py), [all code](../code), [decisions](adr/)\n",
    "docs/adr/README.md": "# Decisions\n\n<!-- pages: 0*.md -->\n",
    "docs/adr/0002-b.md": "# Second\n",
    "docs/adr/0001-a.md": "# First\n",
    "code/run.py": "print('<hello>')\n",
    "code/deep/more.txt": "more\n",
}


def test_links_lead_to_pages_files_and_folders(tmp_path: Path) -> None:
    site, warnings = built(tmp_path, SOUND)
    assert not warnings
    front, page, decisions = ((site / f"docs/{name}.html").read_text() for name in ("index", "one", "adr/README"))
    assert 'href="one.html#deep-inside"' in front
    assert decisions.index("0001-a.html") < decisions.index("0002-b.html")
    for target in ("source/code/run.py.html", "source/code.html"):
        assert f'href="../{target}"' in page and (site / target).exists()
    assert 'href="adr/README.html"' in page
    assert "&lt;hello&gt;" in (site / "source/code/run.py.html").read_text()
    assert 'href="code/run.py.html"' in (site / "source/code.html").read_text()
    assert (site / "source/code/deep/more.txt.html").exists()


def test_links_lead_to_the_repository_if_its_address_is_known(tmp_path: Path) -> None:
    site, warnings = built(tmp_path, SOUND, repository_url="https://example.org/us/it")
    assert not warnings
    assert 'href="https://example.org/us/it/blob/HEAD/code/run.py"' in (site / "docs/one.html").read_text()
    assert not (site / "source").exists()


def test_broken_links_are_warnings(tmp_path: Path) -> None:
    broken = "# One\n\n[page](two.md) [heading](index.md#nowhere) [file](../code/gone.py) ![picture](gone.svg)\n"
    page = '# Decisions\n\n<script src="https://example.org/a.js"></script>\n\n<!-- pages: 0*.md -->\n'
    files = {**SOUND, "docs/one.md": broken, "docs/adr/README.md": page, "docs/adr/lost.md": "# In no list\n"}
    _, warnings = built(tmp_path, files)
    for place, words in (
        ("docs/one.md", "two.md"),
        ("docs/one.md", "nowhere"),
        ("docs/one.md", "gone.py"),
        ("docs/one.md", "gone.svg"),
        ("docs/index.md", "deep-inside"),
        ("docs/adr/lost.md", "isn't included in any toctree"),
        ("adr/README.html", "https://example.org/a.js is loaded from another host"),
    ):
        assert any(place in line and words in line for line in warnings), (place, words, warnings)


def test_an_empty_list_of_pages_is_a_warning(tmp_path: Path) -> None:
    _, warnings = built(tmp_path, {"docs/index.md": "# Front\n\n<!-- pages -->\n\nNo list.\n"})
    assert any("no page follows" in line for line in warnings), warnings
