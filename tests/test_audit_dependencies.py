"""The audit of dependencies, against a database of this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests import audit_dependencies
from tests.audit_dependencies import main, mended_in

FIXED = {
    "affected": [
        {
            "package": {"name": "numpy"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}],
        },
        {"package": {"name": "other"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "99.0"}]}]},
    ]
}


@contextmanager
def database(of_numpy: list[str], advisory: dict[str, Any]) -> Iterator[str]:
    """A server that knows some advisories of numpy alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            assert self.path == "/querybatch" and all(each["package"]["ecosystem"] == "PyPI" for each in asked)
            vulnerable = {"vulns": [{"id": name} for name in of_numpy]}
            self.answer({"results": [vulnerable if each["package"]["name"] == "numpy" else {} for each in asked]})

        def do_GET(self) -> None:
            self.answer(advisory)

        def answer(self, document: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("advisory", "accepted", "code", "said"),
    [
        (FIXED, {}, 1, "update to 99.1"),
        ({"affected": []}, {}, 0, "no version mends it yet"),
        (FIXED, {"PYSEC-1": "that function is not called"}, 0, "that function is not called"),
    ],
)
def test_only_what_a_newer_version_mends_ends_the_build(
    advisory: dict[str, Any],
    accepted: dict[str, str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(audit_dependencies, "ACCEPTED", accepted)
    with database(["PYSEC-1"], advisory) as server:
        assert main(server) == code
    assert f"has PYSEC-1: {said}\n" in capsys.readouterr().out


def test_without_a_network_the_build_goes_on_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("http://127.0.0.1:9") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no advisory database reached") and line.endswith("dependencies were not audited")


def test_a_version_below_the_installed_one_mends_nothing() -> None:
    assert mended_in(FIXED, "numpy", "1.0") == "99.1"
    assert mended_in(FIXED, "NumPy", "99.2") is None
    assert mended_in(FIXED, "torch", "1.0") is None
