"""Which parameters decay, by which rule; rates and decays at every step, as in Megatron's scheduler."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch import nn

from megatron_terapipe.config import OptimizerConfig, TrainingConfig
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.training.build_engine import build_engine
from megatron_terapipe.training.optimizer import (
    LearningRateSchedule,
    apex_fused_adam,
    build_optimizer,
    set_step_sizes,
    weight_decay_at,
)
from tests.distributed import run_each
from tests.model.configs import model_config
from tests.training.equivalence.test_gpt_equivalence import expected_gradients
from tests.training.gpt_runs import Key, Setup, _key, batches, run_of


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("shape", [{}, {"activation": "swiglu", "normalization": "rmsnorm"}], ids=["gpt", "gated"])
def test_matrices_decay_and_vectors_only_in_norms_of_heads_if_set(shape: dict[str, str], of_heads: bool) -> None:
    model = WholeModel(model_config(**shape, qk_norm="head"))
    config = OptimizerConfig(lr=1e-3, weight_decay=0.2, apply_wd_to_qk_layernorm=of_heads)
    groups = build_optimizer(config, model.named_parameters()).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith(".bias") or "norm" in name or name.startswith("layers.5.")
        set_apart = of_heads and any(each in name for each in ("query_norm", "key_norm"))
        assert decay.pop(id(parameter)) == (0.0 if is_vector and not set_apart else 0.2), name
    assert not decay


@pytest.mark.parametrize("untied", [False, True])
def test_a_decoupled_learning_rate_is_that_of_the_words_on_both_ends(untied: bool) -> None:
    model = WholeModel(model_config(untie_embeddings_and_output_weights=untied))
    config = OptimizerConfig(lr=1e-3, decoupled_lr=5e-2, weight_decay=0.2)
    optimizer = build_optimizer(config, model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for at_first, rates in ((True, (1e-3, 5e-2)), (False, (0.5, 0.25))):
        if not at_first:
            set_step_sizes(optimizer, learning_rate=rates[0], of_ends=rates[1], weight_decay=0.3)
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.2 if at_first else 0.3}
        groups = [({names[id(each)] for each in group["params"]}, group["lr"]) for group in optimizer.param_groups]
        ends = {"layers.0.weight"} | ({next(name for name in names.values() if "linear" in name)} if untied else set())
        assert [lr for names, lr in groups if names & ends] == [rates[1]]
        assert [names for names, lr in groups if lr == rates[1]] == [ends], "positions are not among them"


def test_a_bias_of_two_axes_does_not_decay_and_frozen_parameters_and_empty_groups_are_left_out() -> None:
    parameters = {"up.weight": nn.Parameter(torch.ones(2, 3, 4)), "up.bias": nn.Parameter(torch.ones(2, 3))}
    decaying, others = build_optimizer(OptimizerConfig(lr=1.0), parameters.items()).param_groups
    assert (decaying["params"], others["params"]) == ([parameters["up.weight"]], [parameters["up.bias"]])
    assert others["weight_decay"] == 0.0
    parameters["up.bias"].requires_grad_(False)
    (group,) = build_optimizer(OptimizerConfig(lr=1e-3), parameters.items()).param_groups
    assert group["params"] == [parameters["up.weight"]]


def test_flags_reach_the_optimizer() -> None:
    config = OptimizerConfig(lr=0.5, adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.1, weight_decay=0.2)
    optimizer = build_optimizer(config, nn.Linear(3, 2).named_parameters())
    assert type(optimizer) is torch.optim.AdamW  # which decays weights apart from the gradient
    (group, _), names = optimizer.param_groups, ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    assert [group[name] for name in names] == [0.5, (0.8, 0.7), 0.1, 0.2, False, False]
    config = OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.6)
    optimizer = build_optimizer(config, [("bias", nn.Parameter(torch.ones(1)))])
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["momentum"] == 0.6


def test_another_apex_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's package of that name has no such optimizer, whatever the device."""
    assert apex_fused_adam() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    assert apex_fused_adam() is None
    monkeypatch.setitem(sys.modules, "amp_C", ModuleType("amp_C"))
    assert apex_fused_adam() is None


def test_nvidias_apex_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam(torch.optim.AdamW):
        def __init__(self, groups, adam_w_mode: bool, **keywords) -> None:
            assert adam_w_mode
            super().__init__(groups, **keywords)

    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, module in {"amp_C": ModuleType("amp_C"), "apex": ModuleType("apex")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, adam_eps=1e-5), nn.Linear(3, 2).named_parameters())
    assert isinstance(optimizer, FusedAdam)
    assert optimizer.param_groups[0]["eps"] == 1e-5


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
    assert (rates.steps.warmup, rates.steps.decay, rates.max_lr) == (*steps, 2.0)
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


FLAGS = "--num-token-slices 4 --optimizer sgd --sgd-momentum 0 --weight-decay 0 --decoupled-lr 1"
RATE, OF_ENDS = 2.0, 32.0
DECOUPLED = [
    Setup(2, f"{FLAGS} --pipeline-model-parallel-size 2 --zero-stage 1"),
    Setup(2, f"{FLAGS} --zero-stage 1 --untie-embeddings-and-output-weights"),
    Setup(2, f"{FLAGS} --tensor-model-parallel-size 2"),
]


def moved(setup: Setup) -> dict[Key, np.ndarray]:
    """How far one step moved each weight."""
    run = run_of(setup)
    engine = build_engine(run)
    named = {_key(engine, name, each): each for name, each in engine.module.named_parameters()}
    before = {key: each.detach().double().numpy().copy() for key, each in named.items()}
    set_step_sizes(engine.optimizer, learning_rate=RATE, of_ends=OF_ENDS, weight_decay=0.0)
    engine.train_batch(iter(batches(setup, run.layout.coordinate(run.launch.rank).data)))
    return {key: before[key] - each.detach().double().numpy() for key, each in named.items()}


def test_the_words_on_both_ends_move_by_their_own_rate() -> None:
    for setup, ranks in zip(DECOUPLED, run_each(moved, 2, DECOUPLED), strict=True):
        expected = expected_gradients(setup)[1]
        untied = "--untie" in setup.flags
        ends = {"layers.0.weight"} | ({next(name for name in expected if "linear.weight" in name)} if untied else set())
        for found in ranks:
            for (name, share, cut), distance in found.items():
                size = 2 if "--tensor" in setup.flags else 1
                gradient = expected[name] if cut is None else np.split(expected[name], size, axis=cut)[share]
                wanted = gradient * (OF_ENDS if name in ends else RATE)
                assert distance == pytest.approx(wanted, rel=1e-4, abs=1e-5), f"{name} in {setup}"
