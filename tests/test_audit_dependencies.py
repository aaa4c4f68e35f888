"""The audit of dependencies, with the answers of a database."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import audit_dependencies
from tests.audit_dependencies import fixed_in, main

FIXED = {
    "affected": [
        {
            "package": {"name": "numpy"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}],
        },
        {"package": {"name": "other"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "99.0"}]}]},
    ]
}


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Answers in place of a server that has one advisory, of numpy."""

    def answer_with(advisory: dict[str, Any]) -> None:
        def answer(address: str, question: dict[str, Any] | None = None) -> Any:
            if question is None:
                return advisory
            packages = [each["package"] for each in question["queries"]]
            assert address.endswith("/querybatch") and all(each["ecosystem"] == "PyPI" for each in packages)
            return {"results": [{"vulns": [{"id": "PYSEC-1"}]} if each["name"] == "numpy" else {} for each in packages]}

        monkeypatch.setattr(audit_dependencies, "_asked", answer)

    return answer_with


@pytest.mark.parametrize(
    ("advisory", "accepted", "code", "said"),
    [
        (FIXED, {}, 1, "update to 99.1"),
        ({"affected": []}, {}, 0, "no version fixes it yet"),
        (FIXED, {"PYSEC-1": "that function is not called"}, 0, "that function is not called"),
    ],
)
def test_an_advisory_with_a_newer_version_ends_the_build(
    advisory: dict[str, Any],
    accepted: dict[str, str],
    code: int,
    said: str,
    database: Callable[[dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(audit_dependencies, "ACCEPTED", accepted)
    database(advisory)
    assert main("there") == code
    assert f"has PYSEC-1: {said}\n" in capsys.readouterr().out


def test_without_a_network_the_audit_passes_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("http://127.0.0.1:9") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no advisory database reached") and line.endswith("dependencies were not audited")


def test_a_version_below_the_installed_one_fixes_nothing() -> None:
    assert fixed_in(FIXED, "numpy", "1.0") == "99.1"
    assert fixed_in(FIXED, "NumPy", "99.2") is None
    assert fixed_in(FIXED, "torch", "1.0") is None
