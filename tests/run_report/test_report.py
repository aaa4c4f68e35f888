"""Figures of a report, predictions, incidents and unknown figures."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from pydantic import TypeAdapter

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.records import RunEnd
from megatron_terapipe.run_report.comparison import UNKNOWN
from megatron_terapipe.run_report.figures import NO_END, listed
from megatron_terapipe.run_report.report import ReportDocument, RunReport, read_report, report_document, summary
from tests.run_report.made_up import (
    GIB,
    START,
    STRATEGY,
    lines_of,
    whole_run,
    write_answer,
    write_lines,
    write_timeline,
)

TROUBLE = {
    7: {"grad_norm": None, "lm_loss": float("nan")},
    8: {"grad_norm": None},
    12: {"iteration_time_s": 5.0},
    15: {"spiky_loss": True},
    24: {"large_grads": True, "grad_norm": 90.0},
}


@pytest.fixture
def whole(tmp_path: Path) -> RunReport:
    """The report of a run with a timeline and an answer of the search."""
    metrics = write_lines(tmp_path / "run" / "metrics.jsonl", whole_run(TROUBLE))
    timeline, answer = write_timeline(tmp_path / "timeline"), write_answer(tmp_path / "plan" / "ranking.json")
    (report,) = read_report([str(metrics)], search=str(answer), timeline=str(timeline))
    return report


def report_of(folder: Path, lines: list[object]) -> RunReport:
    (report,) = read_report([str(write_lines(folder / "metrics.jsonl", lines))])
    return report


def test_main_figures(whole: RunReport) -> None:
    figures = whole.figures
    assert (figures.iterations, figures.planned, figures.tokens, figures.starts) == (40, 40, 80 * 32, 2)
    assert figures.loss == pytest.approx(sum(10 / number for number in range(31, 41)) / 10)
    assert figures.validation_loss == 11 / 40 and figures.best_validation_loss == (11 / 40, 40)
    # Without the slow first iterations after each start.
    assert (figures.iteration_time_s.median, figures.iteration_time_s.low) == (0.5, 0.5)
    assert figures.tokens_per_s.median == 128.0
    assert (figures.mfu, figures.tflops_per_device) == (0.4, 100.0)
    assert (figures.mfu_causal, figures.tflops_per_device_causal) == (0.3, 75.0)
    assert figures.peak_memory_bytes == (3 * GIB, 2 * GIB)
    assert (figures.skipped, figures.repeated, figures.wall_s) == (2, 5, 100.0)


def test_incidents(whole: RunReport) -> None:
    assert [(each.kind, each.first, each.last) for each in whole.incidents] == [
        ("skipped update", 7, 8),
        ("slow iteration", 12, 12),
        ("spike", 15, 15),
        ("save", 20, 20),
        ("end", 25, 25),
        ("restart", 21, 21),
        ("spike", 24, 24),
        ("end", 40, 40),
    ]
    texts = {each.first: each.text for each in whole.incidents}
    assert texts[12] == "5 s, 10.0 times the median"
    assert texts[21].startswith("started again with iteration 21, 5 iterations were repeated, 60 s after")


def test_each_layout_is_measured_by_itself(tmp_path: Path) -> None:
    """The second is three times as fast; one iteration of it is slow, though it is faster than the first layout."""
    other = replace(START, iteration=20, strategy=replace(STRATEGY, schedule="gpipe").to_json(), time=1e9 + 80)
    fast = {number: {"iteration_time_s": 0.15} for number in range(21, 101)} | {60: {"iteration_time_s": 0.3}}
    lines = [START, *lines_of(range(1, 31), {25: {"iteration_time_s": 2.0}}), other, *lines_of(range(21, 101), fast)]
    report = report_of(tmp_path, lines)
    assert report.figures.iteration_time_s.median == 0.15
    assert [(each.kind, each.where, each.text) for each in report.incidents] == [
        ("end", "iteration 30", NO_END),
        (
            "restart",
            "iteration 21",
            "started again with iteration 21, 10 iterations were repeated, under another layout, "
            "dp 1 · tp 1 · pp 2 · micro-batch 2 · gpipe · 2 token slices · ZeRO 1",
        ),
        ("slow iteration", "iteration 60", "300 ms, 2.0 times the median"),
        ("end", "iteration 100", NO_END),
    ]
    lines = summary([report]).splitlines()
    assert (
        "  iterations 1 to 20: dp 1 · tp 1 · pp 2 · micro-batch 2 · 1f1b · 2 token slices · ZeRO 1, 500 ms an iteration"
        in lines
    )
    assert any(line.startswith("  iterations 21 to 100: ") and line.endswith(", 150 ms an iteration") for line in lines)


def test_the_gravest_incidents_of_a_kind_are_listed(tmp_path: Path) -> None:
    changes = {number: {"iteration_time_s": float(number)} for number in range(5, 35, 5)}
    lines = listed(report_of(tmp_path, [START, *lines_of(range(1, 101), changes)]).incidents, 2)
    assert [text for kind, text in lines if kind == "slow iteration"] == [
        "iteration 25: 25 s, 50.0 times the median",
        "iteration 30: 30 s, 60.0 times the median",
        "4 more, the last at iteration 30",
    ]


def test_predicted_and_measured_figures(whole: RunReport) -> None:
    by_name = {each.name: each for each in whole.compared}
    assert list(by_name) == [
        *("iteration", "tokens a second", "MFU", "causal MFU", "bubble ratio", "memory, stage 0", "memory, stage 1")
    ]
    assert by_name["iteration"].difference == pytest.approx(0.25)
    assert by_name["iteration"].why.startswith("within 350 ms to 600 ms")
    assert by_name["MFU"].difference_text == "-10.0 points"
    assert by_name["causal MFU"].difference_text == "-15.0 points"
    assert by_name["memory, stage 0"].difference == pytest.approx(3 * GIB / 3e9 - 1)
    assert whole.prediction is not None and whole.prediction.differences == ()


def test_differences_between_run_and_prediction(tmp_path: Path) -> None:
    metrics = write_lines(tmp_path / "metrics.jsonl", whole_run())
    priced = replace(STRATEGY, schedule="gpipe", num_token_slices=1, token_slices=None)
    answer = write_answer(tmp_path / "plan" / "ranking.json", priced)
    (report,) = read_report([str(metrics)], search=str(answer.parent))
    assert report.prediction is not None
    assert "schedule: 1f1b ran, gpipe was priced" in report.prediction.differences
    assert "differs from the priced strategy" in report.compared[0].why
    write_answer(answer, replace(priced, num_token_slices=2, token_slices=(32, 32)))
    answer.write_text(answer.read_text().replace('"seq_length": 32', '"seq_length": 64'))
    (report,) = read_report([str(metrics)], search=str(answer))
    assert report.prediction is not None
    assert "lengths of token slices: 16,16 ran, 32,32 was priced" in report.prediction.differences
    assert "sequence: 32 tokens ran, 64 were priced" in report.prediction.differences
    write_lines(tmp_path / "metrics.jsonl", [replace(START, strategy=None), *lines_of(range(1, 9))])
    (report,) = read_report([str(metrics)], search=str(answer))
    assert report.prediction is not None and report.prediction.differences[0] == UNKNOWN


def test_files_are_found_where_the_run_recorded_them(tmp_path: Path) -> None:
    write_answer(tmp_path / "plan" / "ranking.json")
    write_timeline(tmp_path / "steps")
    start = replace(START, directory=str(tmp_path), strategy_file="plan/strategy.json", timeline="steps")
    report = report_of(tmp_path / "run", [start, *lines_of(range(1, 12))])
    assert report.prediction is not None and report.steps is not None
    (tmp_path / "steps" / "iteration_000003.json").write_text("{")
    (tmp_path / "plan" / "ranking.json").write_text("{}")
    report = report_of(tmp_path / "run", [start, *lines_of(range(1, 12))])
    assert report.prediction is None and report.steps is None
    assert "iteration_000003.json" in report.missing[0] and "ranking.json" in report.missing[1]
    assert not any("\n" in line for line in report.missing)


def test_an_unknown_figure_has_a_remedy(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("mfu", "mfu_causal", "peak_memory_bytes"))
    lines = [replace(each, **unknown) for each in lines_of(range(1, 6))]
    report = report_of(tmp_path, lines)
    flags = ("--search", "--timeline", "--eval-interval", "--peak-tflops-per-device", "iterations")
    assert len(report.missing) == len(flags)
    assert all(flag in line for flag, line in zip(flags, report.missing, strict=True))
    assert report.compared == []


def test_a_named_file_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    metrics = str(write_lines(tmp_path / "metrics.jsonl", whole_run()))
    (tmp_path / "ranking.json").write_text("{}")
    for more in ({"search": str(tmp_path)}, {"timeline": str(tmp_path)}, {"search": str(tmp_path / "absent")}):
        with pytest.raises(UserError) as error:
            read_report([metrics], **more)
        assert "\n" not in str(error.value)


def test_the_end_of_a_run_that_failed_or_was_killed(tmp_path: Path) -> None:
    lines = [START, *lines_of(range(1, 6))]
    killed = report_of(tmp_path / "killed", lines)
    assert killed.incidents[-1].text.startswith("no end was recorded")
    failed = report_of(tmp_path / "failed", [*lines, RunEnd(iteration=5, reason="the loss is nan", failed=True)])
    assert (failed.incidents[-1].kind, failed.incidents[-1].text) == ("failure", "the loss is nan")


def test_the_json_has_its_schema(whole: RunReport, tmp_path: Path) -> None:
    bare = report_of(tmp_path / "bare", lines_of(range(1, 6)))
    text = json.dumps(report_document([whole, bare]), allow_nan=False)
    jsonschema.validate(json.loads(text), TypeAdapter(ReportDocument).json_schema())
    run = json.loads(text)["runs"][0]
    assert (run["iterations"], run["bubble_ratio"] > 0, run["end"], run["failed"]) == (40, True, "", False)


def test_the_summary_fits_a_screen(whole: RunReport) -> None:
    lines = summary([whole]).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 140
    assert any("500 ms" in line and "400 ms" in line for line in lines)
