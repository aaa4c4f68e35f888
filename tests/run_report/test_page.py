"""The page of a report: it parses, loads no other file, has all sections, and shows loads of experts. The command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.records import ExpertLoads, latest_loads
from megatron_terapipe.run_report.__main__ import main
from megatron_terapipe.run_report.curves import curves, round_values
from megatron_terapipe.run_report.metrics_file import Piece, line_of, read_runs
from megatron_terapipe.run_report.page import LEVELS, MOST_COLUMNS, expert_pictures
from tests.html_pages import Page
from tests.run_report.made_up import (
    START,
    STRATEGY,
    iteration,
    lines_of,
    whole_run,
    write_answer,
    write_lines,
    write_timeline,
)


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
        "Curves",
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


def test_curves_have_a_line_for_each_layout_and_gaps_for_unknown_losses(tmp_path: Path) -> None:
    other = replace(START, iteration=20, strategy=replace(STRATEGY, num_token_slices=1, token_slices=None).to_json())
    lines = [START, *lines_of(range(1, 31), {5: {"lm_loss": float("nan")}}), other, *lines_of(range(21, 1201))]
    (run,) = read_runs([str(write_lines(tmp_path / "metrics.jsonl", lines))])
    page = curves(run)
    assert "iterations 1 to 20" in page and "iterations 21 to 1200" in page and "nan" not in page
    pictures = re.findall("<svg.*?</svg>", page)
    assert [re.findall('aria-label="(.*?) over', each)[0] for each in pictures] == [
        *("loss", "time of an iteration", "learning rate")
    ]
    for picture in pictures:
        places = [each.split() for each in re.findall('polyline points="(.*?)"', picture)]
        # Means of three iterations each.
        assert [len(each) for each in places] == [7, 394]
        assert all(
            70 <= float(x) <= 1000 and 0 <= float(y) <= 170
            for line in places
            for x, y in [each.split(",") for each in line]
        )
    assert pictures[0].count("<circle") == len(run.evaluations()) == 120 and "<circle" not in pictures[1]
    assert curves(replace(run, pieces=(Piece(START, [iteration(1)]),))) == ""


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [
        (1, 600, [100, 200, 300, 400, 500, 600]),
        (0, 1e-3, [0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3]),
        (2.2, 5.7, [2.5, 3, 3.5, 4, 4.5, 5, 5.5]),
        (1, 2, [1, 1.2, 1.4, 1.6, 1.8, 2]),
    ],
)
def test_axes_have_round_values(low: float, high: float, values: list[float]) -> None:
    assert round_values(low, high) == pytest.approx(values)


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


EVEN = (1.0, 1.0, 1.0, 1.0)


def loads(iteration: int, *of_layers: tuple[float, ...], iterations: int = 50) -> ExpertLoads:
    return ExpertLoads(
        iteration=iteration, iterations=iterations, layers=tuple(range(1, len(of_layers) + 1)), loads=of_layers
    )


@pytest.mark.parametrize(
    ("lines", "starved"),
    [
        # Too few iterations; then the mean of the last 100, without those before.
        ([loads(50, (0.0, 2.0, 1.0, 1.0))], []),
        ([loads(50, (0.0, 2.0, 1.0, 1.0)), loads(100, (0.21, 1.79, 1.0, 1.0))], []),
        ([loads(50, (0.0, 2.0, 1.0, 1.0)), loads(100, (0.19, 1.81, 1.0, 1.0))], [(0.095, 1, 0)]),
        ([loads(50, (0.0, 2.0, 1.0, 1.0)), loads(100, EVEN), loads(150, EVEN)], []),
        # Weighted by iterations.
        (
            [loads(20, (0.0, 2.0, 1.0, 1.0), iterations=20), loads(100, (0.11, 1.89, 1.0, 1.0), iterations=80)],
            [(0.088, 1, 0)],
        ),
        # The lowest first.
        ([loads(100, (0.05, 1.95, 1.0, 1.0), (1.0, 1.0, 2.0, 0.0), iterations=100)], [(0.0, 2, 3), (0.05, 1, 0)]),
        # Another number of experts: a model that was changed.
        ([loads(100, (0.0, 3.0, 0.0), iterations=100), loads(150, EVEN)], []),
    ],
)
def test_experts_starve_over_the_last_iterations(
    lines: list[ExpertLoads], starved: list[tuple[float, int, int]]
) -> None:
    latest = latest_loads(lines)
    assert latest is not None and latest.starved == [pytest.approx(each) for each in starved]
    assert expert_pictures(lines).count("<svg") == 3
    assert latest_loads([]) is None and expert_pictures([]) == ""


def test_pictures_have_a_cell_for_each_expert_and_for_each_time() -> None:
    lines = [loads(number, EVEN, (0.05, number / 50, 3.0, 0.7), iterations=1) for number in range(1, 151)]
    first, *over_time = re.findall(r"<svg.*?</svg>", expert_pictures(lines), re.DOTALL)
    cells = re.findall(r'fill="(#\w+)"><title>layer (\d), (?:expert )?(\d): ([\d.]+)</title>', first)
    colours = {bound: colour for bound, _, colour in LEVELS}
    assert [cell for cell in cells if cell[1] == "1"] == [(colours[1.25], "1", str(each), "1.00") for each in range(4)]
    # The mean of iterations 51 to 150 over 50.
    assert [(colour, load) for colour, layer, _, load in cells if layer == "2"] == [
        (colours[0.1], "0.05"),
        (colours[4.0], "2.01"),
        (colours[4.0], "3.00"),
        (colours[0.8], "0.70"),
    ]
    busiest, least = (re.findall(r"<title>layer 2, (?:iteration )?(\d+): ([\d.]+)<", each) for each in over_time)
    assert len(busiest) == len(least) == 50 <= MOST_COLUMNS
    assert (
        busiest[0] == ("3", "3.00")
        and busiest[-1] == ("150", "3.00")
        and {load for _, load in least} == {"0.04", "0.05"}
    )


def test_a_report_has_pictures_a_line_and_json_of_what_was_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uneven, even = (0.02, 1.98, 1.0, 1.0), loads(40, EVEN, EVEN, iterations=20)
    lines = [START, *lines_of(range(1, 41)), even, replace(START, iteration=20), *lines_of(range(21, 121))]
    lines.append(loads(120, EVEN, uneven, iterations=100))
    metrics = write_lines(tmp_path / "metrics.jsonl", lines)
    page = tmp_path / "report.html"
    assert main([str(metrics), "--json", "--output", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    assert found["expert_loads"]["loads"] == [list(EVEN), list(uneven)] and found["expert_loads"]["iterations"] == 100
    text = (
        "expert 0 of layer 2 received 2.0% of an even share of tokens over the last 100 iterations: raise "
        "--moe-aux-loss-coeff, or add --moe-router-enable-expert-bias"
    )
    (incident,) = (each for each in found["incidents"] if each["kind"] == "starved expert")
    assert incident["text"] == text and (incident["first"], incident["last"]) == (21, 120)
    assert text in page.read_text() and "<h2>Loads of experts</h2>" in page.read_text()
    assert "iteration 40" not in re.findall(r"busiest expert.*", page.read_text())[0]


@pytest.mark.parametrize(
    "changed", [{"loads": [[1.0], [1.0, 2.0]]}, {"loads": []}, {"loads": [[-1.0]]}, {"iterations": 0}, {"layers": []}]
)
def test_damaged_loads_are_refused(changed: dict[str, object]) -> None:
    line = {**loads(100, EVEN).as_json(), "layers": [1], "loads": [[1.0]], **changed}
    with pytest.raises(ConfigError, match="give a file that a run wrote"):
        line_of(json.dumps(line))
