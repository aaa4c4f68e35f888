"""The end of runs, resuming during a ramp of the batch size, and runs that only evaluate."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.launching import (
    NO_EVALUATION,
    WITHOUT_ZERO,
    Launch,
    flags,
    num_metrics,
    read_metrics,
    terapipe,
    train_on_this_rank,
)

RAMP = "--global-batch-size 12 --rampup-batch-size 4 4 24 --log-interval 1".split()
STEPS = ["--step-batch-size-schedule", "0:4 384:8 768:12", "--log-interval", "1", "--eval-iters", "1"]
"""The sizes of the ramp; sequences have 32 tokens."""
SIZES = [4, 4, 4, 8, 8, 12, 12, 12]
"""Of the iterations on that ramp: up to 12, 24 and then all the samples."""


def run(data: Path, metrics: Path, *more: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    words = flags(data, "--metrics-file", metrics, *more)
    if "--step-batch-size-schedule" in words:
        at = words.index("--global-batch-size")
        del words[at : at + 2]
    assert run_distributed(train_on_this_rank, 2, words) == [0, 0]
    return read_metrics(metrics)


def test_a_run_resumes_between_two_steps(data: Path, tmp_path: Path) -> None:
    common = [*STEPS, "--train-iters", 8, "--bf16", "--save", tmp_path / "saved"]
    whole, evaluations = run(data, tmp_path / "whole.jsonl", *common, "--save-interval", 4)
    assert [each["global_batch_size"] for each in whole] == SIZES
    assert [each["consumed_samples"] for each in whole] == [sum(SIZES[:done]) for done in range(1, 9)]
    info = json.loads((tmp_path / "saved" / "global_step4" / "run.json").read_text())
    assert (info["iteration"], info["consumed_samples"]) == (4, sum(SIZES[:4]))
    (tmp_path / "saved" / "latest").write_text("global_step4")
    rest, evaluations_of_rest = run(data, tmp_path / "rest.jsonl", *common, "--load", tmp_path / "saved")
    for name in ("iteration", "global_batch_size", "consumed_samples", "lm_loss", "grad_norm", "learning_rate"):
        assert [each[name] for each in rest] == [each[name] for each in whole[4:]], name
    assert evaluations_of_rest == evaluations[-len(evaluations_of_rest) :]


def test_a_ramp_reads_the_samples_that_a_constant_batch_reads(data: Path, tmp_path: Path) -> None:
    """With a learning rate near 0 the loss of a sample does not depend on its batch, nor on that of an evaluation."""
    still = ["--lr", "1e-30", "--eval-interval", "100"]
    twice = [*still, "--eval-iters", "2", "--eval-global-batch-size", "6", "--eval-micro-batch-size", "3"]
    once = [*still, "--eval-iters", "1", "--eval-global-batch-size", "12"]
    ramp, evaluations = run(data, tmp_path / "ramp.jsonl", *RAMP, "--train-iters", 8, *twice)
    constant, others = run(data, tmp_path / "constant.jsonl", "--global-batch-size", 4, "--train-iters", 16, *once)
    (of_six,), (of_twelve,) = evaluations, others
    assert of_six["validation_lm_loss"] == pytest.approx(of_twelve["validation_lm_loss"], rel=1e-6)
    of_samples = [each["lm_loss"] for each in constant]
    start = 0
    for each in ramp:
        fours = each["global_batch_size"] // 4
        assert each["lm_loss"] == pytest.approx(sum(of_samples[start : start + fours]) / fours, rel=1e-6)
        start += fours


def test_skip_train_only_evaluates(data: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    split = ["--split", "60,20,20"]
    _, evaluations = run(data, tmp_path / "trained.jsonl", *split, "--save", saved)
    assert [sorted(each) for each in evaluations[-2:]] == [
        ["iteration", "validation_lm_loss"],
        ["iteration", "test_lm_loss"],
    ]
    iterations, again = run(data, tmp_path / "evaluated.jsonl", *split, "--load", saved, "--skip-train")
    assert not iterations
    assert again == evaluations[-2:]


@pytest.mark.parametrize(("flag", "value", "last"), [("--exit-duration-in-mins", "1e-6", 1), ("--exit-interval", 2, 2)])
def test_an_early_end_saves_a_checkpoint(data: Path, tmp_path: Path, flag: str, value: object, last: int) -> None:
    iterations, evaluations = run(data, tmp_path / "metrics.jsonl", flag, value, "--save", tmp_path / "saved")
    assert [each["iteration"] for each in iterations] == list(range(1, last + 1))
    assert not evaluations or flag == "--exit-interval", "no evaluation when the time is over"
    assert (tmp_path / "saved" / "latest").read_text() == f"global_step{last}"


def test_a_signal_to_the_command_ends_all_with_a_checkpoint_and_exit_code_0(data: Path, tmp_path: Path) -> None:
    """As from Slurm and Kubernetes. All ranks save the same iteration."""
    outputs = ["--save", "saved", "--metrics-file", "metrics.jsonl", "--train-iters", 100000, "--log-interval", 1]
    words = flags(data, *outputs, *NO_EVALUATION, *WITHOUT_ZERO, "--exit-signal-handler")
    launched = Launch(tmp_path, words, launcher=terapipe())
    metrics = tmp_path / "metrics.jsonl"
    launched.wait_for(lambda: num_metrics(metrics) > 3)
    os.kill(launched.processes()["the command"], signal.SIGTERM)
    assert launched.wait() == 0, launched.output()
    iterations, _ = read_metrics(metrics)
    done = iterations[-1]["iteration"]
    assert f" exiting after iteration {done}, because a SIGTERM came" in launched.output()
    assert "error:" not in launched.output()
    assert (tmp_path / "saved" / "latest").read_text() == f"global_step{done}"
    assert not launched.survivors()
