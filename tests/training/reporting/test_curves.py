"""TensorBoard and Weights & Biases, read back from the files they write."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.reporters import (
    Reporter,
    Reporters,
    TensorBoard,
    WeightsAndBiases,
    evaluation_points,
    iteration_points,
)
from tests.training.reporting.samples import EVALUATION, ITERATION, SKIPPED, TEST

EVERYTHING = LoggingConfig(
    log_timers_to_tensorboard=True,
    log_batch_size_to_tensorboard=True,
    log_validation_ppl_to_tensorboard=True,
    log_memory_to_tensorboard=True,
    log_world_size_to_tensorboard=True,
)


def test_which_points_there_are_by_default() -> None:
    assert iteration_points(ITERATION, LoggingConfig(), 4) == {
        "lm loss": ITERATION.lm_loss,
        "grad-norm": 1.25,
        "learning-rate": 1e-4,
    }
    assert evaluation_points(TEST, LoggingConfig()) == {"lm loss test": 2.0}


def test_which_points_flags_add() -> None:
    metrics = replace(ITERATION, loss_scale=8.0, params_norm=3.0, peak_memory_bytes=(10, 20))
    assert iteration_points(metrics, EVERYTHING, 4) == {
        "lm loss": ITERATION.lm_loss,
        "grad-norm": 1.25,
        "params-norm": 3.0,
        "learning-rate": 1e-4,
        "loss-scale": 8.0,
        "batch-size": 8,
        "world-size": 4,
        "iteration-time": 0.5,
        "tokens-per-second": 512.0,
        "throughput": 100.0,
        "mfu": 0.25,
        "mem-max-allocated-bytes stage 0": 10,
        "mem-max-allocated-bytes stage 1": 20,
    }
    assert evaluation_points(EVALUATION, EVERYTHING)["lm loss validation ppl"] == pytest.approx(4.851652e8)


def test_timers_and_zeros_have_curves_if_they_are_measured() -> None:
    measured = replace(ITERATION, num_zeros_in_grad=12, timers={"optimizer": (0.25, 0.5)})
    points = iteration_points(measured, LoggingConfig(log_timers_to_tensorboard=True), 4)
    assert (points["num-zeros"], points["optimizer-time"]) == (12, 0.5)
    assert "optimizer-time" not in iteration_points(measured, LoggingConfig(), 4)


def test_which_points_flags_take_away() -> None:
    logging = LoggingConfig(no_log_learning_rate_to_tensorboard=True, no_log_loss_scale_to_tensorboard=True)
    assert iteration_points(replace(SKIPPED, loss_scale=8.0), logging, 4) == {"lm loss": 9.0}


def test_tensorboard_files_hold_the_curves_over_iterations_and_over_samples(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(str(tmp_path / "board"), LoggingConfig(tensorboard_log_interval=2), 1)
    for iteration in range(1, 6):
        board.iteration(
            replace(ITERATION, iteration=iteration, consumed_samples=8 * iteration, lm_loss=float(iteration))
        )
    board.evaluation(EVALUATION)
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in found.Scalars(name)]

    assert curve("lm loss") == [(2, 2.0), (4, 4.0)]
    assert curve("lm loss vs samples") == [(16, 2.0), (32, 4.0)]
    assert curve("lm loss validation") == [(7, 1000.0)]
    assert set(found.Tags()["scalars"]) >= {"grad-norm", "learning-rate", "learning-rate vs samples"}


def test_weights_and_biases_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network it keeps them, to be sent later."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    reporter = WeightsAndBiases(LoggingConfig(wandb_project="thin", wandb_save_dir=str(tmp_path)), {"seed": 7}, 1)
    reporter.iteration(ITERATION)
    reporter.evaluation(EVALUATION)
    reporter.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for word in (b"thin", b"grad-norm", b"lm loss validation", b"1000"):
        assert word in written


def test_weights_and_biases_without_a_login_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**settings: Any) -> None:
        raise wandb.errors.UsageError("No API key\nconfigured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError) as caught:
        WeightsAndBiases(LoggingConfig(wandb_project="thin"), {}, 1)
    assert str(caught.value) == (
        "--wandb-project thin cannot be reported to (No API key configured.): log in, or set WANDB_MODE=offline"
    )


class RecordedRun:
    """Stands where Weights & Biases would send, because its own file cannot be read back point by point."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.logged, self.finished = settings, [], False

    def log(self, points: dict[str, float], *, step: int) -> None:
        self.logged.append((step, points))

    def finish(self) -> None:
        self.finished = True


def test_weights_and_biases_gets_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    runs: list[RecordedRun] = []
    monkeypatch.setattr(wandb, "init", lambda **settings: runs.append(RecordedRun(**settings)) or runs[-1])
    logging = LoggingConfig(wandb_project="thin", wandb_exp_name="first", tensorboard_log_interval=7)
    reporter = WeightsAndBiases(logging, {"seed": 7}, 1)
    reporter.iteration(ITERATION)
    reporter.iteration(SKIPPED)
    reporter.evaluation(EVALUATION)
    reporter.close()
    (run,) = runs
    assert run.settings == {"project": "thin", "name": "first", "dir": None, "config": {"seed": 7}}
    assert run.logged == [
        (7, iteration_points(ITERATION, logging, 1) | {"samples": 56}),
        (7, {"lm loss validation": 1000.0}),
    ]
    assert run.finished


def test_every_reporter_hears_everything() -> None:
    class Listener(Reporter):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def iteration(self, metrics: object) -> None:
            self.heard.append(metrics)

        def evaluation(self, metrics: object) -> None:
            self.heard.append(metrics)

        def note(self, line: str) -> None:
            self.heard.append(line)

        def close(self) -> None:
            self.heard.append("closed")

    listeners = [Listener(), Listener()]
    reporters = Reporters(listeners)
    reporters.iteration(ITERATION)
    reporters.evaluation(TEST)
    reporters.note("said")
    reporters.close()
    assert [each.heard for each in listeners] == [[ITERATION, TEST, "said", "closed"]] * 2
