"""Reporters: log lines, progress bar, curves, and the metrics file."""

import io
import json
import re
import resource
import sys
import threading
from dataclasses import replace
from errno import ENOSPC
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.records import EvaluationMetrics, ExpertLoads, Line, Note, Progress, Saved
from megatron_terapipe.run_report.metrics_file import line_of
from megatron_terapipe.training.reporters import (
    LogLines,
    ProgressBar,
    Reporters,
    TensorBoard,
    WeightsAndBiases,
    evaluation_line,
    iteration_line,
    points_of,
    timer_lines,
    write_metrics,
)
from tests.training.samples import EVALUATION, ITERATION, SKIPPED, TEST


def test_a_line_has_megatrons_fields_in_its_order() -> None:
    line = iteration_line([replace(ITERATION, loss_scale=65536.0, params_norm=12.3456)], 100)
    assert line == (
        " iteration        7/     100 | consumed samples:           56 | elapsed time per iteration (ms): 500.0 |"
        " throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: 1.000000E-04 | global batch size:     8 |"
        " lm loss: 5.123457E+00 | loss scale: 65536.0 | grad norm: 1.250 | params norm: 12.346 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 | tokens per second: 512 |"
        " causal TFLOP/s/GPU: 60.0 | MFU: 25.0% | causal MFU: 15.0% |"
    )


def test_in_fp32_the_scale_is_1_and_unknown_numbers_are_omitted() -> None:
    line = iteration_line(
        [replace(ITERATION, mfu=None, mfu_causal=None, tflops_per_device=0.00123, num_zeros_in_grad=1234)], 100
    )
    assert "| loss scale: 1.0 | grad norm: 1.250 | num zeros: 1234 | number of skipped" in line
    assert "(TFLOP/s/GPU): 1.2e-03 |" in line
    assert "MFU" not in line
    assert "params norm" not in line


def test_a_line_of_several_is_their_mean_by_time() -> None:
    slow = replace(ITERATION, iteration=8, lm_loss=3.0, iteration_time_s=1.5, tokens_per_second=128.0)
    slow = replace(slow, tflops_per_device=20.0, mfu=0.05, tflops_per_device_causal=12.0, mfu_causal=0.03)
    line = iteration_line([ITERATION, slow], 100)
    assert "elapsed time per iteration (ms): 1000.0 |" in line
    # 0.5 s at 512 and 1.5 s at 128: 448 tokens in 2 s; so for FLOPs.
    flops = "causal TFLOP/s/GPU: 24.0 | MFU: 10.0% | causal MFU: 6.0%"
    assert line.endswith(f"tokens per second: 224 | {flops} | time left: 0:01:32 |")
    assert "(TFLOP/s/GPU): 40.0 |" in line
    assert f"lm loss: {(ITERATION.lm_loss + 3) / 2:.6E} |" in line


def test_skipped_and_nan_iterations_are_counted_and_not_averaged() -> None:
    nan = replace(ITERATION, lm_loss=float("nan"))
    line = iteration_line([ITERATION, nan, SKIPPED], 100)
    assert "| number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    assert "| lm loss: 5.123457E+00 |" in line
    assert "grad norm" not in line
    assert "lm loss" not in iteration_line([SKIPPED], 100)


def test_further_predictions_are_named_as_in_megatron() -> None:
    further, after = replace(ITERATION, mtp_losses=(2.5, 3.5)), replace(ITERATION, mtp_losses=(1.5, 2.5))
    line = iteration_line([further, after], 100)
    assert "| lm loss: 5.123457E+00 | mtp_1 loss: 2.000000E+00 | mtp_2 loss: 3.000000E+00 | loss scale" in line
    assert points_of(replace(after, iteration=1), LoggingConfig(tensorboard_log_interval=1), 1)["mtp_2 loss"] == 2.5
    assert evaluation_line(replace(TEST, mtp_losses=(2.5,))).endswith("| mtp_1 loss: 2.500000E+00 |")
    unknown = replace(EVALUATION, mtp_losses=(2.5, float("nan")))
    read = line_of(json.dumps(unknown.as_json()))
    assert isinstance(read, EvaluationMetrics) and read.mtp_losses[0] == 2.5 and isnan(read.mtp_losses[1])


def test_evaluations() -> None:
    # A loss of 1000 has no finite perplexity: it is cut at e^20.
    assert evaluation_line(EVALUATION) == (
        " validation loss at iteration 7 | lm loss value: 1.000000E+03 | lm loss PPL: 4.851652E+08 |"
    )
    assert evaluation_line(TEST) == (
        " validation loss at iteration 7 on test set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
    )


def test_a_line_of_a_model_with_experts_has_their_loss_and_the_highest_load(capsys: pytest.CaptureFixture[str]) -> None:
    loads = ExpertLoads(
        iteration=7, iterations=7, layers=(0,), loads=((0.25, 1.75),), losses={"load_balancing_loss": 0.0123}
    )
    log = LogLines(4, 20)
    for line in (loads, ITERATION):
        log(line)
    after = "| lm loss: 5.123457E+00 | load_balancing_loss: 1.230000E-02 | max/mean expert load: 1.75 | loss scale"
    assert after in capsys.readouterr().out
    assert "| lm loss: 5.123457E+00 | max/mean" in iteration_line([ITERATION], 20, replace(loads, losses={}))


def test_a_line_comes_after_the_first_iteration_and_then_at_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogLines(4, 20)
    for iteration in range(6, 14):
        log(replace(ITERATION, iteration=iteration))
        log(Note(iteration=iteration, text=f"after {iteration}"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" iteration")]
    assert [int(re.match(r" iteration +(\d+)/", line)[1]) for line in lines] == [6, 8, 12]


def test_timers_are_means_in_megatrons_words(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogLines(2, 100)
    log(replace(ITERATION, timers={"optimizer": (0.25, 1.0)}))
    capsys.readouterr()
    for seconds in (1.0, 3.0):
        log(replace(ITERATION, iteration=8, timers={"optimizer": (seconds / 2, seconds)}))
    _, head, line = capsys.readouterr().out.splitlines()[:3]
    assert head == "(min, max) time across ranks (ms):"
    assert line == f"    optimizer {'.' * 38}: (500.00, 1000.00)"
    measured = [replace(ITERATION, timers={"optimizer": (1.0,)}), replace(ITERATION, timers={"optimizer": (2.0,)})]
    assert timer_lines(measured, "max")[1] == f"    optimizer {'.' * 38}: 1500.00"
    by_rank = [replace(ITERATION, timers={"optimizer": (1.0, 2.0)})]
    assert timer_lines(by_rank, "all")[1:] == ["  optimizer:", "     rank  0: 1000.00", "     rank  1: 2000.00"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(done=6, train_iters=9)
    bar(ITERATION)
    LogLines(1, 9)(Note(iteration=7, text="a line above the bar"))
    bar.close()
    return stream.getvalue()


def test_only_a_terminal_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, Terminal())
    assert "6/9" in text and "7/9" in text
    assert drawn(monkeypatch, io.StringIO()) == ""


EVERYTHING = LoggingConfig(
    log_timers_to_tensorboard=True,
    log_batch_size_to_tensorboard=True,
    log_validation_ppl_to_tensorboard=True,
    log_memory_to_tensorboard=True,
    log_world_size_to_tensorboard=True,
)


def test_flags_choose_the_points() -> None:
    plain = LoggingConfig()
    by_default = {"lm loss": ITERATION.lm_loss, "grad-norm": 1.25, "learning-rate": 1e-4}
    assert points_of(ITERATION, plain, 4) == by_default
    assert points_of(TEST, plain, 4) == {"lm loss test": 2.0}
    metrics = replace(ITERATION, loss_scale=8.0, params_norm=3.0, peak_memory_bytes=(10, 20))
    assert points_of(metrics, EVERYTHING, 4) == by_default | {
        "params-norm": 3.0,
        "loss-scale": 8.0,
        "batch-size": 8,
        "world-size": 4,
        "iteration-time": 0.5,
        "tokens-per-second": 512.0,
        "throughput": 100.0,
        "throughput-causal": 60.0,
        "mfu": 0.25,
        "mfu-causal": 0.15,
        "mem-max-allocated-bytes stage 0": 10,
        "mem-max-allocated-bytes stage 1": 20,
    }
    assert points_of(EVALUATION, EVERYTHING, 4)["lm loss validation ppl"] == pytest.approx(4.851652e8)
    measured = replace(ITERATION, num_zeros_in_grad=12, timers={"optimizer": (0.25, 0.5)})
    points = points_of(measured, EVERYTHING, 4)
    assert (points["num-zeros"], points["optimizer-time"]) == (12, 0.5)
    assert "optimizer-time" not in points_of(measured, plain, 4)
    less = LoggingConfig(no_log_learning_rate_to_tensorboard=True, no_log_loss_scale_to_tensorboard=True)
    assert points_of(replace(SKIPPED, loss_scale=8.0), less, 4) == {"lm loss": 9.0}


def test_tensorboard_files_hold_the_curves_over_iterations_and_over_samples(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start in (0, 2):  # It is killed, and resumed after the second iteration.
        progress = Progress(iteration=start, consumed_samples=8 * start)
        board = TensorBoard(str(tmp_path / "board"), LoggingConfig(tensorboard_log_interval=2), 1, progress)
        for iteration in range(start + 1, 6):
            board(replace(ITERATION, iteration=iteration, consumed_samples=8 * iteration, lm_loss=float(iteration)))
        board(EVALUATION)
        board.close()
    by_folder = [accumulator.EventAccumulator(str(tmp_path / "board" / each)).Reload() for each in ("", "samples")]

    def curve(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in by_folder["samples" in name].Scalars(name)]

    assert curve("lm loss") == [(2, 2.0), (4, 4.0)]
    assert curve("lm loss vs samples") == [(16, 2.0), (32, 4.0)]
    assert curve("lm loss validation") == [(7, 1000.0)]
    tags = [set(found.Tags()["scalars"]) for found in by_folder]
    assert tags[0] >= {"grad-norm", "learning-rate"} and tags[1] >= {"learning-rate vs samples"}


def test_weights_and_biases_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the files are for a later upload."""
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    reporter = WeightsAndBiases(LoggingConfig(wandb_project="thin", wandb_save_dir=str(tmp_path)), {"seed": 7}, 1)
    reporter(ITERATION)
    reporter(EVALUATION)
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
    """A run that records its points, because the file of Weights & Biases cannot be read back by point."""

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
    reporter(ITERATION)
    reporter(SKIPPED)
    reporter(EVALUATION)
    reporter.close()
    (run,) = runs
    assert run.settings == {"project": "thin", "name": "first", "dir": None, "config": {"seed": 7}}
    assert run.logged == [
        (7, points_of(ITERATION, logging, 1) | {"samples": 56}),
        (7, {"lm loss validation": 1000.0}),
    ]
    assert run.finished


def test_every_reporter_gets_every_line() -> None:
    found: list[list[object]] = [[], []]
    reporters = Reporters()
    for lines in found:
        reporters.add("", lines.append, partial(lines.append, "closed"))
    reporters(ITERATION)
    reporters(TEST)
    reporters.note("text")
    reporters.close()
    first, second, note, closed = found[0]
    assert (first, second, note.iteration, note.text, closed) == (ITERATION, TEST, 7, "text", "closed")
    assert found[1] == found[0]


def test_an_output_that_fails_is_reported_once_and_tried_again(tmp_path: Path) -> None:
    """A full disk under a log does not end a run, and leaves no incomplete line."""
    lines: list[Line] = []
    (tmp_path / "m.jsonl").touch()

    def fail() -> None:
        raise OSError(ENOSPC, "No space left on device")

    reporters = Reporters()
    reporters.add("--metrics-file m.jsonl", write_metrics(str(tmp_path / "m.jsonl")), fail)
    reporters.add("the log", lines.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    reporters(ITERATION)
    try:
        # The next line fits in part.
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "m.jsonl").stat().st_size + 20, limit[1]))
        reporters(ITERATION)
        reporters(ITERATION)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    reporters(EVALUATION)
    with reporters.writing("--timeline t"):
        fail()
    with pytest.raises(ConfigError), reporters.writing("--timeline t"):
        raise ConfigError("an error of the user")
    reporters.close()
    assert [each for each in lines if not isinstance(each, Note)] == [*[ITERATION] * 3, EVALUATION]
    assert [each.text for each in lines if isinstance(each, Note)] == [
        f" warning: {output} could not be written (No space left on device) and may lack lines: training continues"
        for output in ("--metrics-file m.jsonl", "--timeline t")
    ]
    found = objects(tmp_path / "m.jsonl")
    assert found[:2] == [ITERATION.as_json(), EVALUATION.as_json()] and found[2]["event"] == "note"


def test_a_failed_thread_of_tensorboard_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    board = TensorBoard(str(tmp_path), LoggingConfig(tensorboard_queue_size=1), 1, Progress())
    for path in [*tmp_path.glob("*events*"), *tmp_path.glob("*/*events*")]:
        path.unlink()
        path.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        for _ in range(1000):
            board(ITERATION)
    assert "Traceback" not in capfd.readouterr().err


def objects(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_on_disk_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "metrics.jsonl"
    file = write_metrics(str(path))
    file(ITERATION)
    assert objects(path) == [ITERATION.as_json()]
    assert {"iteration": 7, "lm_loss": 5.123456789012345, "mfu": 0.25, "loss_scale": None}.items() <= objects(path)[
        0
    ].items()
    file(EVALUATION)
    file(TEST)
    assert objects(path)[1:] == [{"iteration": 7, "validation_lm_loss": 1000.0}, {"iteration": 7, "test_lm_loss": 2.0}]
    file(replace(SKIPPED, lm_loss=nan))
    assert (objects(path)[3]["grad_norm"], objects(path)[3]["lm_loss"]) == (None, None)
    assert "NaN" not in path.read_text()


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = write_metrics(str(path))
    file(Saved(iteration=3, seconds=0.5, time=1e9))
    file(Note(iteration=7, text=" something happened"))
    write_metrics(str(path))(EVALUATION)
    saved, note, _ = objects(path)
    assert saved == {"event": "save", "iteration": 3, "seconds": 0.5, "time": 1e9}
    assert note.pop("time") > 1e9
    assert note == {"event": "note", "iteration": 7, "text": "something happened"}
