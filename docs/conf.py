"""Settings of the documentation site (`make docs`).

Sphinx with MyST and furo: MkDocs has had no release since August 2024, and Material for MkDocs depends on it. The
source directory is the whole repository, so that the address of a page is its path: relative links between pages and to
source files also work on a code host. Sphinx reads this file with `docs/` as its configuration
directory.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepspeed_ext import __version__  # noqa: E402

project = "megatron-terapipe"
author = "the authors of megatron-terapipe"
project_copyright = f"{author}; Apache-2.0"
release = version = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.extensions.docstrings",
    "docs.extensions.generated_text",
    "docs.extensions.json_schemas",
    "docs.extensions.offline",
    "docs.extensions.page_lists",
    "docs.extensions.public_names",
    "docs.extensions.repository_files",
]

# Pages: the Markdown of docs/, and the files of the repository that people look for by these names.
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"]
exclude_patterns = ["**/.*", "build", "runs", "docs/extensions", "docs/theme"]

# As code hosts do: headings have anchors, and fenced code in unknown words is plain.
myst_heading_anchors = 4

# `--flag` stays as it is typed.
smartquotes = False

# Every reference must lead somewhere, but for types in signatures: those of other projects have no page here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

# Docstrings are Google's, with Markdown's single backticks for code.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

# The repository's address, once it has one: links to source files then lead there, and not to the copies in the site.
repository_url = os.environ.get("TERAPIPE_REPOSITORY_URL", "").rstrip("/")

# `make docs-links`: an address that is gone is an error; one that does not answer in time, after three tries, is not.
linkcheck_timeout = 20
linkcheck_retries = 3
linkcheck_report_timeouts_as_broken = False
# Their anchors are made in the browser.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]

html_theme = "furo"
html_title = "megatron-terapipe"
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_extra_path = ["theme/start"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = (
    {
        "source_repository": repository_url,
        "source_branch": "HEAD",
        "source_directory": "",
    }
    if repository_url
    else {}
)
pygments_style = "friendly"
pygments_dark_style = "github-dark"
