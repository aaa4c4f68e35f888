"""`make docs-links`: which addresses of other sites are errors, held against a server of our own."""

import io
import json
import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

from tests.architecture.sources import ROOT

STATUS = {"/sound": 200, "/gone": 404, "/moved": 301}
PAGE = """# Front

[Sound]({0}/sound), [with an anchor]({0}/sound#here), [moved]({0}/moved).

[Gone]({0}/gone).

[No such anchor]({0}/sound#nowhere).

[Nobody listens](http://127.0.0.1:{1}/).
"""


class Handler(BaseHTTPRequestHandler):
    """Answers as `STATUS` says."""

    def do_GET(self) -> None:
        self.send_response(STATUS[self.path])
        if STATUS[self.path] == 301:
            self.send_header("Location", "/sound")
        self.end_headers()
        self.wfile.write(b'<p id="here">here</p>')

    do_HEAD = do_GET  # noqa: N815 - likewise

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_is_gone_is_named_with_its_line_and_ends_the_build(tmp_path: Path, address: str) -> None:
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    ours = {name: value for name, value in settings.items() if name.startswith("linkcheck_")}
    assert len(ours) > 3
    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        (tmp_path / "index.md").write_text(PAGE.format(address, nobody.getsockname()[1]))
        warnings = io.StringIO()
        overrides = {"extensions": ["myst_parser"], "linkcheck_anchors": True, **ours}
        out = tmp_path / "links"
        with docutils_namespace():
            app = Sphinx(tmp_path, None, out, tmp_path / "pages", "linkcheck", overrides, status=None, warning=warnings)
            app.build()
    found = {each["uri"]: each for each in map(json.loads, (out / "output.json").read_text().splitlines())}
    status = {uri.replace(address, ""): each["status"] for uri, each in found.items()}
    nobody_listens = next(uri for uri in status if uri.startswith("http:"))
    assert status == {
        "/sound": "working",
        "/sound#here": "working",
        "/moved": "redirected",
        "/gone": "broken",
        "/sound#nowhere": "broken",
        nobody_listens: "broken",
    }
    assert app.statuscode == 1
    said = warnings.getvalue()
    assert "index.md:5" in said and f"{address}/gone" in said and "404" in said
    assert f"{address}/sound#nowhere" in said and "refused" in said
    assert f"{address}/moved" not in said
