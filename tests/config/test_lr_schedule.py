"""The learning rate: closed forms at the points where the shape changes."""

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from megatron_terapipe.config import OptimizerConfig
from megatron_terapipe.training.lr_schedule import LearningRateSchedule

STYLES = ["constant", "linear", "cosine", "inverse-square-root"]


def schedule(style: str, *, warmup: int = 10, decay: int = 110, min_lr: float = 0.1) -> LearningRateSchedule:
    return LearningRateSchedule(max_lr=1.0, min_lr=min_lr, decay_style=style, warmup_iters=warmup, decay_iters=decay)


@pytest.mark.parametrize("style", STYLES)
def test_warmup_rises_on_a_line_from_zero(style: str) -> None:
    assert [schedule(style).at(iteration) for iteration in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert schedule(style, warmup=0).at(0) == 1.0


@pytest.mark.parametrize(
    ("style", "quarter", "half", "end", "after"),
    [
        ("constant", 1.0, 1.0, 1.0, 1.0),
        ("linear", 0.775, 0.55, 0.1, 0.1),
        ("cosine", 0.1 + 0.9 * (1 + sqrt(0.5)) / 2, 0.55, 0.1, 0.1),
        ("inverse-square-root", sqrt(10 / 35), sqrt(10 / 60), sqrt(10 / 110), 0.1),
    ],
)
def test_decay(style: str, quarter: float, half: float, end: float, after: float) -> None:
    rates = [schedule(style).at(iteration) for iteration in (35, 60, 110, 111)]
    assert rates == pytest.approx([quarter, half, end, after], abs=1e-12)


@given(draw.sampled_from(STYLES), draw.integers(0, 20), draw.integers(21, 60), draw.integers(0, 100))
def test_never_rises_after_the_warmup_and_stays_in_range(style: str, warmup: int, decay: int, iteration: int) -> None:
    rates = schedule(style, warmup=warmup, decay=decay)
    assert 0 <= rates.at(iteration) <= 1
    if iteration >= warmup:
        assert 0.1 <= rates.at(iteration + 1) <= rates.at(iteration)


def test_from_config() -> None:
    section = OptimizerConfig(lr=2.0, min_lr=0.5, lr_decay_style="cosine", lr_warmup_fraction=0.25)
    assert LearningRateSchedule.from_config(section, 40) == LearningRateSchedule(
        max_lr=2.0, min_lr=0.5, decay_style="cosine", warmup_iters=10, decay_iters=40
    )
    section = OptimizerConfig(lr=2.0, lr_warmup_iters=3, lr_decay_iters=20)
    rates = LearningRateSchedule.from_config(section, 40)
    assert (rates.warmup_iters, rates.decay_iters) == (3, 20)
