"""The page of a report: it parses, loads no other file, and has all sections. The command: its files and errors."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_terapipe.run_report.__main__ import main
from tests.html_pages import Page
from tests.run_report.made_up import START, lines_of, whole_run, write_answer, write_lines, write_timeline


def test_a_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    start = replace(START, command="pretrain_gpt.py '<script>alert(1)</script>'", model_name="<b>&")
    lines = [start, *lines_of(range(1, 41), {15: {"spiky_loss": True}})]
    metrics = write_lines(tmp_path / "run" / "metrics.jsonl", lines)
    timeline, answer = write_timeline(tmp_path / "timeline"), write_answer(tmp_path / "plan" / "ranking.json")
    words = ["--search", str(answer), "--timeline", str(timeline), "--output", str(tmp_path / "deep" / "report.html")]
    assert main([str(metrics), *words]) == 0
    page = (tmp_path / "deep" / "report.html").read_text()
    parsed = Page(page)
    assert parsed.headings == [
        "Predicted and measured",
        "Parts of an iteration",
        "Memory of each stage",
        "Timeline, measured and simulated",
        "Incidents",
        "Start, end and command",
    ]
    assert "iteration 15: loss 0.6667" in page
    loading = {"src", "href", "xlink:href", "action", "data", "poster"}
    assert not [each for each in parsed.attributes if each[0] in loading]
    assert not re.search(r"@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[^\s\"'&<]+", page)) <= {"http://www.w3.org/2000/svg"}
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width: 640px", 'name="viewport"'):
        assert rule in page
    assert "<script>alert" not in page and "<b>&" not in page


def test_several_runs_have_sections_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write_lines(tmp_path / f"{name}.jsonl", whole_run())) for name in ("first", "second")]
    assert main([*files, "--output", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("2 training runs\n")
    headings = Page((tmp_path / "report.html").read_text()).headings
    assert [each for each in headings if each.startswith("Run")] == ["Run (first)", "Run (second)"]


def test_json_goes_to_standard_output_or_a_file_and_never_replaces_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_lines(tmp_path / "metrics.jsonl", whole_run())
    before, figures = metrics.read_bytes(), tmp_path / "figures.json"
    assert main([str(metrics), "--json"]) == 0
    output = capsys.readouterr().out
    for _ in range(2):
        assert main([str(metrics), "--json", str(figures)]) == 0
        assert figures.read_text() == output and capsys.readouterr().out
    for run in (metrics, tmp_path):
        assert main([str(metrics), "--json", str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --json {run} ")
    assert metrics.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: "),
        (["absent.jsonl"], "error: absent.jsonl "),
        (["--outptu", "x"], "error: "),
        (["a", "b", "--search", "c"], "error: --search c "),
    ],
)
def test_errors_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(line) and printed.err.count("\n") == 1
