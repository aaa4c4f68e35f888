"""Metrics files are read, and pieces of a run are put together."""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.records import Note
from megatron_terapipe.run_report.figures import incidents
from megatron_terapipe.run_report.metrics_file import line_of, metrics_schema, read_runs
from megatron_terapipe.run_report.report import read_report
from tests.run_report.made_up import START, iteration, lines_of, whole_run, write_lines
from tests.training.samples import EVALUATION, ITERATION, SKIPPED, TEST


def text_of(line: Any) -> str:
    return json.dumps(line.as_json())


def test_every_line_of_a_run_is_read_and_has_the_schema() -> None:
    validator, note = Draft202012Validator(metrics_schema()), Note(iteration=3, text="something")
    for line in (ITERATION, SKIPPED, START, note, EVALUATION, TEST, *whole_run()):
        # Lines of evaluations do not have the samples of training.
        assert line_of(text_of(line)) == (replace(line, consumed_samples=0) if hasattr(line, "part") else line)
        validator.validate(json.loads(text_of(line)))
    unknown = text_of(replace(SKIPPED, lm_loss=float("nan")))
    assert isnan(line_of(unknown).lm_loss)
    validator.validate(json.loads(unknown))
    for bad in ({}, {"event": "party"}, {"iteration": 3}, {"iteration": 3, "validation_lm_loss": "x"}):
        assert not validator.is_valid(bad)
    assert '"description"' in json.dumps(metrics_schema()["$defs"]["IterationMetrics"]["properties"]["grad_norm"])


def test_repeated_iterations_count_once(tmp_path: Path) -> None:
    (run,) = read_runs([str(write_lines(tmp_path / "metrics.jsonl", whole_run()))])
    assert [each.iteration for each in run.iterations] == list(range(1, 41))
    assert (len(run.pieces), run.num_repeated) == (2, 5)
    assert [each.iteration for each in run.evaluations()] == [10, 20, 30, 40]
    # Without two iterations after each start.
    assert [each.iteration for each in run.steady] == [*range(3, 21), *range(23, 41)]
    assert run.name == tmp_path.name


def test_a_start_that_was_killed_before_its_first_iteration_repeats_none(tmp_path: Path) -> None:
    lines = [*whole_run(), replace(START, time=1e9 + 200)]
    (report,) = read_report([str(write_lines(tmp_path / "metrics.jsonl", lines))])
    assert [each.iteration for each in report.run.iterations] == list(range(1, 41))
    assert [each.iteration for each in report.run.evaluations()] == [10, 20, 30, 40]
    assert (report.figures.starts, report.figures.repeated) == (3, 5)
    assert [each.text.partition(",")[0] for each in report.incidents if each.kind == "restart"] == [
        "started again with iteration 21",
        "started again with iteration 1",
    ]
    assert "iteration 1, 100 s after the previous end" in report.incidents[-2].text


def test_an_incomplete_last_line_is_skipped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", lines_of(range(1, 6)))
    path.write_text(path.read_text()[:-30])
    (run,) = read_runs([str(path)])
    assert len(run.iterations) == 4
    assert len(run.faults) == 1 and run.faults[0].startswith(f"{path}: the last line ")


HOSTILE = (
    *({"lm_loss": "1e300"}, {"iteration_time_s": "nan"}, {"grad_norm": "inf"}, {"learning_rate": -1e41}),
    *({"peak_memory_bytes": ["9" * 400]}, {"iteration": "9" * 400}),
)


@pytest.mark.parametrize(
    "bad",
    ['{"iteration": "x"}', "[1]", "{", '{"event": "party"}', '{"event": ["start"]}', "7" * 9]
    + [json.dumps(iteration(3).as_json() | each) for each in HOSTILE],
)
def test_damaged_lines_are_skipped_with_one_warning(tmp_path: Path, bad: str) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", lines_of(range(1, 6)))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], bad, bad, *lines[2:], ""]))
    (run,) = read_runs([str(path)])
    assert len(run.iterations) == 5
    (fault,) = run.faults
    assert fault.startswith(f"{path}: line 3, and 1 more lines ") and "\n" not in fault


def test_iterations_stay_in_order_where_the_line_of_a_start_was_damaged(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "metrics.jsonl", lines_of([9, 1, 2, 3, 2, 3, 4], {1: {"spiky_loss": True}}))
    (run,) = read_runs([str(path)])
    assert [each.iteration for each in run.iterations] == [1, 2, 3, 4, 9]
    assert [each.where for each in incidents(run) if each.kind == "spike"] == ["iteration 1"]


@pytest.mark.parametrize("text", ["", "nothing\n", "{}\n", None])
def test_a_file_without_an_iteration_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match="cannot be read" if text is None else "has no line of an iteration") as error:
        read_runs([str(tmp_path)])
    assert "\n" not in str(error.value)
