"""Learning rate and weight decay: Megatron's own scheduler at every step, and lengths in its units."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from megatron_terapipe.config import OptimizerConfig, TrainingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.optimizer_schedules import LearningRateSchedule, weight_decay_at

STYLES = ["constant", "linear", "cosine", "inverse-square-root"]
WSD_STYLES = ["exponential", "linear", "cosine", "minus_sqrt"]


class Groups:
    """Parameter groups for Megatron's scheduler."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}]


@settings(deadline=None)
@given(data=draw.data(), style=draw.sampled_from([*STYLES, "WSD"]), wsd_style=draw.sampled_from(WSD_STYLES))
def test_both_are_megatrons_at_every_step(data: Any, style: str, wsd_style: str) -> None:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    batch_size, train_iters = data.draw(draw.integers(1, 64)), data.draw(draw.integers(2, 60))
    decay_iters = data.draw(draw.integers(2, 60))
    warmup_iters = data.draw(draw.integers(0, decay_iters - 1))
    wsd_iters = data.draw(draw.integers(1, decay_iters))
    init_lr, min_lr = data.draw(draw.sampled_from([(0.0, 0.0), (0.01, 0.1)]))
    incr_style = data.draw(draw.sampled_from(["constant", "linear", "cosine"]))
    start, end = (0.1, 0.1) if incr_style == "constant" else (0.02, 0.3)
    # Megatron counts samples also where the training is counted in iterations.
    theirs = scheduler(
        Groups(), init_lr, 0.5, min_lr, warmup_iters * batch_size, decay_iters * batch_size, style,
        start, end, train_iters * batch_size, incr_style,
        wsd_decay_steps=wsd_iters * batch_size, lr_wsd_decay_style=wsd_style,
    )  # fmt: skip
    in_samples = data.draw(draw.booleans())
    unit, factor = ("samples", batch_size) if in_samples else ("iters", 1)
    rising = {} if incr_style == "constant" else {"start_weight_decay": start, "end_weight_decay": end}
    section = OptimizerConfig(
        lr=0.5, min_lr=min_lr, lr_decay_style=style, lr_wsd_decay_style=wsd_style, lr_warmup_init=init_lr,
        weight_decay=0.1, weight_decay_incr_style=incr_style, **rising,
        **{f"lr_warmup_{unit}": warmup_iters * factor, f"lr_decay_{unit}": decay_iters * factor},
        **{f"lr_wsd_decay_{unit}": wsd_iters * factor},
    )  # fmt: skip
    training = TrainingConfig(**{f"train_{unit}": train_iters * factor})
    rates = LearningRateSchedule.from_config(section, training, global_batch_size=batch_size, seq_length=8)
    for iteration in range(max(train_iters, decay_iters) + 3):
        (group,) = theirs.optimizer.param_groups
        assert rates.at(iteration * factor) == pytest.approx(group["lr"], rel=1e-12, abs=1e-15)
        decay = weight_decay_at(iteration * factor, section, training)
        assert decay == pytest.approx(group["weight_decay"], rel=1e-12)
        theirs.step(batch_size)


@pytest.mark.parametrize(
    ("length", "settings", "steps"),
    [
        ({"train_iters": 40}, {"lr_warmup_fraction": 0.25}, (10, 40)),
        # Megatron does not cut 2.5 iterations of warmup off to 2.
        ({"train_iters": 10}, {"lr_warmup_fraction": 0.25}, (2.5, 10)),
        ({"train_iters": 40}, {"lr_warmup_iters": 3, "lr_decay_iters": 20}, (3, 20)),
        ({"train_samples": 400}, {"lr_warmup_samples": 30}, (30, 400)),
        # Tokens are counted in the unit of the training: samples of 8 tokens, or iterations of 4 samples.
        ({"train_samples": 500}, {"lr_warmup_tokens": 84, "lr_decay_tokens": 804}, (10.5, 100.5)),
        ({"train_iters": 500}, {"lr_warmup_tokens": 84, "lr_decay_tokens": 804}, (10.5 / 4, 100.5 / 4)),
    ],
)
def test_from_config(length: dict[str, int], settings: dict[str, float], steps: tuple[float, float]) -> None:
    section = OptimizerConfig(lr=2.0, min_lr=0.0, lr_decay_style="linear", **settings)
    rates = LearningRateSchedule.from_config(section, TrainingConfig(**length), global_batch_size=4, seq_length=8)
    assert (rates.warmup_steps, rates.decay_steps, rates.max_lr) == (*steps, 2.0)
    assert rates.at(sum(steps) / 2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ({}, (1.0, 0.1)),
        ({"decoupled_lr": 3.0}, (3.0, 0.1)),
        ({"decoupled_lr": 3.0, "decoupled_min_lr": 0.5}, (3.0, 0.5)),
    ],
)
def test_the_ends_of_the_model_may_have_rates_of_their_own(flags: dict[str, float], rates: tuple[float, float]) -> None:
    assert OptimizerConfig(lr=1.0, min_lr=0.1, **flags).ends == rates


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"decoupled_min_lr": 0.5}, "--decoupled-min-lr 0.5 .*--decoupled-lr"),
        ({"decoupled_lr": 0.5, "decoupled_min_lr": 0.6}, "--decoupled-min-lr 0.6 is above --decoupled-lr 0.5"),
        ({"decoupled_lr": 0.05}, "--decoupled-min-lr 0.1 is above --decoupled-lr 0.05"),
        ({"decoupled_lr": 0.5, "lr_warmup_init": 0.7}, "--lr-warmup-init 0.7 is above --decoupled-lr 0.5"),
        ({"decoupled_lr": -1.0}, "--decoupled-lr -1.0 is out of range"),
    ],
)
def test_rates_of_the_ends_that_do_not_fit(flags: dict[str, float], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        OptimizerConfig(lr=1.0, min_lr=0.1, **flags)
