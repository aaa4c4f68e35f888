"""The learning rate of NeoX, iteration by iteration, is that of the flags."""

from math import cos, pi
from typing import Any

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.convert import cut_off
from megatron_terapipe.training.optimizer_schedules import LearningRateSchedule
from tests.neox.test_conversion import converted, parsed


def neoxs_rate(iteration: int, *, peak: float, lowest: float, warmup: float, last: int, style: str) -> float:
    """What NeoX's scheduler gives, as its formulas say."""
    rise = warmup * last
    if rise and iteration <= rise:
        return peak * iteration / rise
    progress = (iteration - rise) / (last - rise)
    if style == "cosine":
        return max(lowest, lowest + (peak - lowest) / 2 * (cos(pi * progress) + 1))
    return max(lowest, peak * (1 - progress) if style == "linear" else peak)


@pytest.mark.parametrize("lowest", [0.0, 0.2])
@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(
    ("warmup", "end"), [(0.1, {}), (0.0, {"lr_decay_iters": 60}), (0.1, {"lr_decay_fraction": 0.5})]
)
def test_it_is_neoxs_at_every_iteration(style: str, lowest: float, warmup: float, end: dict[str, Any]) -> None:
    optimizer = {"type": "Adam", "params": {"lr": 1.0}}
    conversion = converted(optimizer=optimizer, lr_decay_style=style, min_lr=lowest, warmup=warmup, **end)
    config = parsed(conversion)
    schedule = LearningRateSchedule.from_config(config.optimizer, config.training, global_batch_size=2, seq_length=128)
    last = {"lr_decay_iters": 60, "lr_decay_fraction": 50}.get(next(iter(end), ""), 100)
    for iteration in range(100 if style != "cosine" else last + 1):
        expected = neoxs_rate(iteration, peak=1.0, lowest=lowest, warmup=warmup, last=last, style=style)
        assert schedule.at(iteration) == pytest.approx(expected, rel=1e-12, abs=1e-15), iteration
    remarked = {setting for setting, _ in conversion.remarks}
    assert remarked == ({"lr_decay_iters"} if style == "cosine" and end else set())


def test_a_line_that_ends_between_iterations_is_said_to_be_near() -> None:
    assert cut_off(100, 0.0, highest=1.0, lowest=0.1).end == 90
    near = cut_off(100, 0.01, highest=1.0, lowest=0.333)
    assert (near.end, near.exact) == (67, False)
    assert near.warmup_fraction * near.end == pytest.approx(1.0, rel=1e-15)
    assert (
        "lr_decay_style",
        "min_lr is reached within half an iteration of where NeoX reaches it, at 67",
    ) in converted(optimizer={"params": {"lr": 1.0}}, min_lr=0.333).remarks


def test_files_of_llemma_say_it_in_words_of_their_own() -> None:
    config = parsed(
        converted(optimizer={"params": {"lr": 0.5}}, lr_decay_style="cosine", decay_lr_to=0.1, warmup_iters=5)
    )
    assert config.optimizer.min_lr == pytest.approx(0.05, rel=1e-15)
    assert config.optimizer.lr_warmup_fraction == pytest.approx(5 / 100, rel=1e-15)


def test_what_is_not_here_or_said_twice() -> None:
    for twice in ({"min_lr": 0.1, "decay_lr_to": 0.1}, {"warmup": 0.1, "warmup_iters": 5}):
        with pytest.raises(ConfigError, match=r": remove one$"):
            converted(**twice)
    with pytest.raises(
        ConfigError, match=r"^lr_decay_style exponential: it can be constant, linear or cosine: this training"
    ):
        converted(lr_decay_style="exponential")
    with pytest.raises(ConfigError, match=r"^lr_decay_iters 5 and lr_decay_fraction 0.5 both end the decay: remove"):
        converted(lr_decay_iters=5, lr_decay_fraction=0.5)
