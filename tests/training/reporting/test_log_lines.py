"""Lines for people, and for what reads Megatron's logs."""

import re
from dataclasses import replace

import pytest

from megatron_terapipe.training.reporters import LogLines, evaluation_line, iteration_line, timer_lines
from tests.training.reporting.samples import EVALUATION, ITERATION, SKIPPED, TEST


def test_a_line_has_megatrons_fields_in_its_order() -> None:
    line = iteration_line([replace(ITERATION, loss_scale=65536.0, params_norm=12.3456)], 100)
    assert line == (
        " iteration        7/     100 | consumed samples:           56 | elapsed time per iteration (ms): 500.0 |"
        " throughput per GPU (TFLOP/s/GPU): 100.0 | learning rate: 1.000000E-04 | global batch size:     8 |"
        " lm loss: 5.123457E+00 | loss scale: 65536.0 | grad norm: 1.250 | params norm: 12.346 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 | tokens per second: 512 | MFU: 25.0% |"
    )


def test_in_fp32_the_scale_is_1_and_what_is_unknown_is_left_out() -> None:
    line = iteration_line([replace(ITERATION, mfu=None, tflops_per_device=0.00123)], 100)
    assert "| loss scale: 1.0 |" in line
    assert "(TFLOP/s/GPU): 1.2e-03 |" in line
    assert "MFU" not in line
    assert "params norm" not in line


def test_a_line_of_several_is_their_mean_by_time() -> None:
    slow = replace(ITERATION, iteration=8, lm_loss=3.0, iteration_time_s=1.5, tokens_per_second=128.0)
    slow = replace(slow, tflops_per_device=20.0, mfu=0.05)
    line = iteration_line([ITERATION, slow], 100)
    assert "elapsed time per iteration (ms): 1000.0 |" in line
    # 0.5 s at 512 and 1.5 s at 128: 448 tokens in 2 s; so for FLOPs.
    assert line.endswith("tokens per second: 224 | MFU: 10.0% | time left: 0:01:32 |")
    assert "(TFLOP/s/GPU): 40.0 |" in line
    assert f"lm loss: {(ITERATION.lm_loss + 3) / 2:.6E} |" in line


def test_what_was_skipped_or_no_number_is_counted_and_not_averaged() -> None:
    nan = replace(ITERATION, lm_loss=float("nan"))
    line = iteration_line([ITERATION, nan, SKIPPED], 100)
    assert "| number of skipped iterations:   1 | number of nan iterations:   1 |" in line
    assert "| lm loss: 5.123457E+00 |" in line
    assert "grad norm" not in line
    assert "lm loss" not in iteration_line([SKIPPED], 100)


def test_evaluations() -> None:
    # A loss of 1000 has no finite perplexity: it is cut at e^20.
    assert evaluation_line(EVALUATION) == (
        " validation loss at iteration 7 | lm loss value: 1.000000E+03 | lm loss PPL: 4.851652E+08 |"
    )
    assert evaluation_line(TEST) == (
        " validation loss at iteration 7 on test set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
    )


def test_a_line_comes_after_the_first_iteration_and_then_at_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogLines(4, 20)
    for iteration in range(6, 14):
        log.iteration(replace(ITERATION, iteration=iteration))
        log.note(f"after {iteration}")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" iteration")]
    assert [int(re.match(r" iteration +(\d+)/", line)[1]) for line in lines] == [6, 8, 12]


def test_zeros_in_the_gradient_stand_behind_its_norm() -> None:
    line = iteration_line([replace(ITERATION, num_zeros_in_grad=1234)], 100)
    assert "| grad norm: 1.250 | num zeros: 1234 | number of skipped" in line


def test_timers_are_means_in_megatrons_words(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogLines(2, 100)
    log.iteration(replace(ITERATION, timers={"optimizer": (0.25, 1.0)}))
    capsys.readouterr()
    for seconds in (1.0, 3.0):
        log.iteration(replace(ITERATION, iteration=8, timers={"optimizer": (seconds / 2, seconds)}))
    _, head, line = capsys.readouterr().out.splitlines()[:3]
    assert head == "(min, max) time across ranks (ms):"
    assert line == f"    optimizer {'.' * 38}: (500.00, 1000.00)"
    measured = [replace(ITERATION, timers={"optimizer": (1.0,)}), replace(ITERATION, timers={"optimizer": (2.0,)})]
    assert timer_lines(measured, "max")[1] == f"    optimizer {'.' * 38}: 1500.00"
    by_rank = [replace(ITERATION, timers={"optimizer": (1.0, 2.0)})]
    assert timer_lines(by_rank, "all")[1:] == ["  optimizer:", "     rank  0: 1000.00", "     rank  1: 2000.00"]
