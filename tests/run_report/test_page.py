"""The page of a report: it parses, needs nothing else, and shows what there is."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_terapipe.run_report.__main__ import main
from tests.run_report.made_up import START, iteration, lines_of, whole_run, write_answer, write_lines, write_timeline

VOID = {"meta", "br", "input", "img", "link", "hr"}


class Page(HTMLParser):
    """Elements of a page, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture
def page(tmp_path: Path) -> str:
    metrics = write_lines(tmp_path / "run" / "metrics.jsonl", whole_run({15: {"spiky_loss": True}}))
    timeline, answer = write_timeline(tmp_path / "timeline"), write_answer(tmp_path / "plan" / "ranking.json")
    words = ["--search", str(answer), "--timeline", str(timeline), "--output", str(tmp_path / "deep" / "report.html")]
    assert main([str(metrics), *words]) == 0
    return (tmp_path / "deep" / "report.html").read_text()


def test_every_element_is_closed_and_every_section_there(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.headings == [
        "Curves over iterations",
        "What the search promised, and what came",
        "Where an iteration goes",
        "Memory of each stage",
        "Timeline, measured and simulated",
        "What happened",
        "The run",
    ]


def test_it_needs_nothing_else(page: str) -> None:
    wanted = {"src", "href", "xlink:href", "action", "data", "poster"}
    assert not [each for each in Page(page).attributes if each[0] in wanted]
    assert not re.search(r"@import|url\((?!#)", page)
    addresses = {each for each in re.findall(r"https?://[^\s\"'&<]+", page)}
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_it_has_rules_for_the_dark_for_paper_and_for_phones(page: str) -> None:
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width: 640px", 'name="viewport"'):
        assert rule in page


def test_charts_have_titles_and_descriptions(page: str) -> None:
    charts = re.findall(r'<svg viewBox="[^"]+" role="img"><title>([^<]+)</title><desc>([^<]+)</desc>', page)
    names = [name for name, _ in charts]
    assert names[:3] == ["Loss", "Time of an iteration", "Tokens a second"] and names[-1] == "Peak memory so far"
    assert all(text != "nothing recorded" for _, text in charts)


def test_words_of_a_run_are_no_markup(tmp_path: Path) -> None:
    start = replace(START, command="pretrain_gpt.py '<script>alert(1)</script>'", model_name="<b>&")
    metrics = write_lines(tmp_path / "metrics.jsonl", [start, *lines_of(range(1, 6))])
    assert main([str(metrics), "--output", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text and "<b>&" not in text and Page(text).open == []


def test_a_long_run_makes_a_moderate_page(tmp_path: Path) -> None:
    metrics = write_lines(tmp_path / "metrics.jsonl", [START, *(iteration(number) for number in range(1, 5_001))])
    assert main([str(metrics), "--output", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 300_000
    assert "means of up to 17 iterations" in text


def test_several_runs_stand_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write_lines(tmp_path / f"{name}.jsonl", whole_run())) for name in ("first", "second")]
    assert main([*files, "--output", str(tmp_path / "report.html"), "--pictures", str(tmp_path / "pictures")]) == 0
    assert capsys.readouterr().out.startswith("2 training runs\n")
    text = (tmp_path / "report.html").read_text()
    assert Page(text).headings[0] == "Runs"
    (picture,) = (tmp_path / "pictures").glob("loss.svg")
    assert {"first", "second", "first, validation"} <= set(re.findall(r">([^<>]+)</text>", picture.read_text()))


def test_json_stands_alone_or_in_a_file_and_never_replaces_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = write_lines(tmp_path / "metrics.jsonl", whole_run())
    before, figures = metrics.read_bytes(), tmp_path / "figures.json"
    assert main([str(metrics), "--json"]) == 0
    alone = capsys.readouterr().out
    for _ in range(2):
        assert main([str(metrics), "--json", str(figures)]) == 0
        assert figures.read_text() == alone and capsys.readouterr().out
    for run in (metrics, tmp_path):
        assert main([str(metrics), "--json", str(run)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --json {run} is a run, which the figures would replace: ")
    assert metrics.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: no run is named"),
        (["absent.jsonl"], "error: absent.jsonl cannot be read"),
        (["--outptu", "x"], "error: "),
        (["a", "b", "--search", "c"], "error: --search c is of one run, and 2 are named"),
    ],
)
def test_errors_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(line) and said.err.count("\n") == 1
