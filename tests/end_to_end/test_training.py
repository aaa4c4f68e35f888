"""A run: its metrics, files and log, and the same losses with other token slices."""

import json
import os
import re
from math import log
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.command import main as plan_command
from deepspeed_ext.plan.measured import StepRecord
from deepspeed_ext.plan.schedules import rank_orders, schedule_named
from deepspeed_ext.plan.timeline import executed_order
from megatron_terapipe.records import Saved
from megatron_terapipe.run_report.report import read_report
from megatron_terapipe.strategy import Strategy
from tests.distributed import run_distributed
from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import flags, read_metrics, train_on_this_rank

CONTRACT = {"iteration", "lm_loss", "grad_norm", "learning_rate", "iteration_time_s", "tokens_per_second"}


@pytest.fixture(scope="module")
def iterations(trained: Trained) -> list[dict[str, Any]]:
    return read_metrics(trained.metrics)[0]


def test_every_iteration_has_the_fields_of_the_contract(iterations: list[dict[str, Any]]) -> None:
    assert [each["iteration"] for each in iterations] == [1, 2, 3, 4, 5, 6]
    for each in iterations:
        assert each.keys() >= CONTRACT
        assert each["grad_norm"] > 0
        assert each["consumed_samples"] == 8 * each["iteration"]
        assert each["tokens_per_second"] == pytest.approx(8 * 32 / each["iteration_time_s"])
        assert 0 < each["tflops_per_device_causal"] < each["tflops_per_device"]
    assert [each["learning_rate"] for each in iterations] == pytest.approx([1e-2 * (6 - done) / 6 for done in range(6)])


def test_the_loss_falls(trained: Trained, iterations: list[dict[str, Any]]) -> None:
    """From that of a guess among 257 words, every iteration of this easy text brings it down."""
    losses = [each["lm_loss"] for each in iterations]
    assert losses[0] == pytest.approx(log(257), abs=0.05)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1
    evaluations = read_metrics(trained.metrics)[1]
    assert [each.keys() for each in evaluations] == [{"iteration", "validation_lm_loss"}] * 2
    assert [each["iteration"] for each in evaluations] == [3, 6]
    # Unseen text of the same kind costs what training text costs between two iterations.
    assert losses[3] - 0.2 < evaluations[0]["validation_lm_loss"] < losses[2]
    assert evaluations[1]["validation_lm_loss"] < losses[5]


def test_no_file_of_a_run_has_a_secret_of_the_environment(trained: Trained) -> None:
    """Log, metrics, timeline, checkpoints, and all other files in its folder."""
    files = [path for path in trained.folder.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "report.html", "run.json", "latest"} <= {path.name for path in files}
    assert not [path for path in files if b"secret-of-" in path.read_bytes()]


def test_the_report_of_a_run(trained: Trained) -> None:
    (report,) = read_report([str(trained.metrics)])
    start, end = report.run.start, report.run.end
    assert start is not None and end is not None
    assert (start.iteration, start.train_iters, start.machine.device, start.machine.num_devices) == (0, 6, "cpu", 2)
    assert Strategy.from_json(start.strategy).pipeline_parallel_size == 2
    assert (end.iteration, end.reason, end.failed) == (6, "", False)
    assert [saved.iteration for saved in report.run.pieces[0].of(Saved)] == [3, 6]
    assert len(report.figures.peak_memory_bytes) == 2 and report.figures.starts == 1
    assert report.steps is not None and len(report.steps.comparison.steps) == 3
    assert "wrote the report report.html" in trained.output


def test_the_log(trained: Trained) -> None:
    text = trained.output
    assert re.findall(r"^ iteration +(\d+)/ +6 \| consumed samples", text, re.MULTILINE) == ["1"]
    assert re.findall(r"^ saved checkpoint (\S+)$", text, re.MULTILINE) == [
        "checkpoints/global_step3",
        "checkpoints/global_step6",
    ]
    assert len(re.findall(r"^ validation loss at iteration [36] ", text, re.MULTILINE)) == 2
    assert (trained.checkpoints / "latest").read_text() == "global_step6"


def test_the_timelines_are_the_schedule_as_executed(trained: Trained) -> None:
    folder = trained.folder / "timeline"
    files = sorted(path.name for path in folder.glob("iteration_*.json"))
    assert files == [f"iteration_{iteration:06d}.json" for iteration in (3, 4, 5)]
    for name, iteration in zip(files, read_metrics(trained.metrics)[0][2:5], strict=True):
        step = StepRecord.from_json((folder / name).read_text())
        assert (step.schedule, step.iteration, step.token_slices) == ("1f1b", iteration["iteration"], (8, 8, 8, 8))
        shape = step.timeline.shape
        assert (shape.num_stages, shape.num_micro_batches, shape.num_token_slices) == (2, 4, 4)
        assert executed_order(step.timeline) == rank_orders(schedule_named("1f1b"), shape)
        assert 0 < step.timeline.makespan < iteration["iteration_time_s"] * 1.05


def test_the_last_timeline_is_drawn(trained: Trained) -> None:
    folder = trained.folder / "timeline"
    assert (folder / "timeline.json").read_text() == (folder / "iteration_000005.json").read_text()
    assert (folder / "timeline.svg").read_text().startswith("<svg")
    assert (folder / "timeline.html").read_text().startswith("<!doctype html>")
    events = json.loads((folder / "timeline.trace.json").read_text())
    assert len([each for each in events["traceEvents"] if each["ph"] == "X"]) == 2 * 2 * 4 * 4


def test_measured_steps_and_their_simulation(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["--timeline", str(trained.folder / "timeline"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [step["iteration"] for step in figures["steps"]] == [3, 4, 5]
    assert figures["simulated"]["makespan"] == pytest.approx(figures["eta"] * figures["makespan"])
    assert figures["eta"] > 0
    assert figures["deadlock_free"] and figures["schedule"] == "1f1b"


@pytest.mark.parametrize("cut", ["--num-token-slices 1", "--num-token-slices 3 --token-slices 13,1,18"])
def test_token_slices_do_not_change_the_losses(trained: Trained, data: Path, tmp_path: Path, cut: str) -> None:
    """After six updates the losses agree to a few units in the last place of fp32."""
    path = tmp_path / "metrics.jsonl"
    assert run_distributed(train_on_this_rank, 2, flags(data, "--metrics-file", path, *cut.split())) == [0, 0]
    found, expected = read_metrics(path), read_metrics(trained.metrics)
    assert len(found[0]) == 6
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-6)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine["validation_lm_loss"] == pytest.approx(theirs["validation_lm_loss"], rel=1e-6)


def _alone_on_its_host(words: list[str]) -> int:
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
    return train_on_this_rank(words)


def test_ranks_that_are_alone_on_their_hosts_train_as_on_one(trained: Trained, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    words = flags(data, "--metrics-file", path, "--save", tmp_path / "checkpoints")
    assert run_distributed(_alone_on_its_host, 2, words) == [0, 0]
    for found, expected in zip(read_metrics(path), read_metrics(trained.metrics), strict=True):
        losses = [[each.get("lm_loss", each.get("validation_lm_loss")) for each in run] for run in (found, expected)]
        assert losses[0] == losses[1]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step6"


def test_another_seed_gives_other_losses(trained: Trained, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    one = ["--pipeline-model-parallel-size", 1, "--train-iters", 1, "--eval-iters", 0, "--seed", 7]
    assert run_distributed(train_on_this_rank, 1, flags(data, "--metrics-file", path, *one)) == [0]
    (found, _), (expected, _) = read_metrics(path), read_metrics(trained.metrics)
    assert found[0]["lm_loss"] != pytest.approx(expected[0]["lm_loss"], rel=1e-4)
