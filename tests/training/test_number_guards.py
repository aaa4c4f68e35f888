"""Checks of the numbers of a run: NaN and infinity, and spikes."""

import random
from collections.abc import Iterator
from math import inf, nan
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.health.states import states_of
from megatron_terapipe.config.training import NumbersConfig
from megatron_terapipe.errors import NumbersError
from megatron_terapipe.training.build_engine import build_engine
from megatron_terapipe.training.number_guards import (
    LEAST_VALUES,
    BadIteration,
    BadNumbers,
    RememberedBatches,
    SpikeGuard,
    check_evaluation,
    refuse_bad_states,
    refuse_different_copies,
)
from tests.distributed import run_distributed
from tests.faults.injection import Fault, Injection
from tests.training.gpt_runs import Setup, batches, run_of

PIPELINE = "--pipeline-model-parallel-size 2 --num-token-slices 4"
TENSOR = "--tensor-model-parallel-size 2"
FP16 = "--fp16 --zero-stage 1 --initial-loss-scale 1 --hysteresis 1"
"""At the lowest scale, so that no overflow is cured by lowering it."""


LOSS, GRADIENT = "iteration 1: the loss is nan", "iteration 1: the gradient is NaN or infinite"
FIRST = "; the first NaN or infinity was in "
HERE = {"iteration": 1, "micro_batch": 1, "token_slice": 2}
AT = "at micro-batch 1, token slice 2"

CASES: dict[str, dict[Fault, str]] = {
    PIPELINE: {
        Fault(kind="loss", rank=1, **HERE): f"{LOSS}{FIRST}the loss on rank 1, {AT}; the weights are those before it",
        Fault(kind="loss", rank=1, once=True, **HERE): f"{LOSS}; computed again it is finite",
    },
    f"{PIPELINE} --recompute-granularity stage": {
        Fault(kind="loss", rank=1, **HERE): f"{LOSS}{FIRST}the loss on rank 1, {AT}; the weights are those before it",
        # Of the final norm, which is computed only in the backward.
        Fault(kind="output", rank=1, name="6", **HERE): f"{LOSS}{FIRST}the output of layer 6 on rank 1, {AT}",
        Fault(kind="gradient", rank=1, name="4", **HERE): (
            f"{GRADIENT}{FIRST}the gradient of the output of layer 4 on rank 1, {AT}"
        ),
    },
    f"{PIPELINE} --bf16 --zero-stage 1": {
        Fault(kind="loss", value=float("inf"), rank=1, **HERE): (
            f"iteration 1: the loss is inf{FIRST}the loss on rank 1, {AT}"
        ),
        Fault(kind="output", rank=0, name="2.mlp", **HERE): f"{LOSS}{FIRST}the output of layer 2.mlp on rank 0, {AT}",
    },
    f"{PIPELINE} {FP16}": {
        Fault(kind="gradient", rank=1, name="4", **HERE): (
            f"{GRADIENT} at the lowest loss scale, 1{FIRST}the gradient of the output of layer 4 on rank 1, {AT}"
        ),
    },
    "--num-token-slices 4": {
        Fault(kind="weight gradient", rank=1, name="3.mlp_norm", **HERE): (
            f"{GRADIENT}{FIRST}the gradient of weight 3.mlp_norm.weight on rank 1, {AT}"
        ),
    },
    f"{TENSOR} --num-token-slices 4 --sequence-parallel --bf16": {
        Fault(kind="output", rank=1, name="3.mlp.up", **HERE): (
            f"{LOSS}{FIRST}the output of layer 3.mlp.up on rank 1, {AT}"
        ),
    },
    "--context-parallel-size 2 --num-token-slices 4": {
        Fault(kind="output", rank=1, name="3.mlp", **HERE): (
            f"{LOSS}{FIRST}the output of layer 3.mlp on rank 1, {AT}, in its tokens 20 to 23; the weights"
        ),
    },
    f"{TENSOR} --num-token-slices 4": {
        # It is on no other rank of the model, and the norm of the gradient counts the copy of rank 0.
        Fault(kind="weight gradient", rank=1, name="3.mlp_norm", **HERE): (
            f"{GRADIENT}{FIRST}the gradient of weight 3.mlp_norm.weight on rank 1, {AT}"
        ),
    },
}
"""Faults by the flags of the run, and the first words of the error of each."""


class Endless(Iterator[Any]):
    """The same micro-batches again and again."""

    def __init__(self, made: list[Any]) -> None:
        self._made, self._next = made, 0

    def __next__(self) -> Any:
        self._next += 1
        return self._made[(self._next - 1) % len(self._made)]


class Training:
    """An engine, its guard, and micro-batches."""

    def __init__(self, flags: str, **numbers: Any) -> None:
        get_accelerator().is_fp16_supported = lambda: True
        setup = Setup(2, flags)
        run = run_of(setup)
        self.engine, self.lines = build_engine(run), []
        self.guard = BadNumbers(NumbersConfig(**numbers), self.engine, self.lines.append)
        self.batches = RememberedBatches(Endless(batches(setup, run.layout.coordinate(run.launch.rank).data)))
        self.iteration = 0

    def step(self) -> float:
        self.batches.begin()
        loss = self.engine.train_batch(self.batches).item()
        self.iteration += 1
        self.guard.check(self.iteration, loss, self.batches)
        return loss

    def states(self) -> dict[str, torch.Tensor]:
        return {str(each): each.values.clone() for each in states_of(self.engine)}


def lines_and_differences(flags: str, faults: list[Fault]) -> tuple[list[str], int]:
    """The line about each fault in the first step; and states that they changed, in the step or in those after."""
    training = Training(flags)
    before, lines, changed = training.states(), [], 0
    for fault in faults:
        with Injection(training.engine, fault):
            try:
                training.step()
                raise AssertionError("a bad number without an error")
            except BadIteration as error:
                lines.append(str(error))
        # Moments may be made in the first step; then they are zero.
        after = training.states()
        changed += sum(not torch.equal(after[name], before.get(name, torch.zeros_like(after[name]))) for name in after)
        training.engine.uncount_step()
        training.iteration -= 1
    if "--pipeline" not in flags or "--fp16" in flags:
        training.step()
        refuse_different_copies(training.engine, 1, 0)
        return lines, changed
    # The batch again without the fault, with equal results.
    sound = Training(flags)
    losses = [(training.step(), sound.step()) for _ in range(2)]
    changed += sum(of_this != of_sound for of_this, of_sound in losses)
    expected, found = sound.states(), training.states()
    return lines, changed + sum(not torch.equal(expected[name], found[name]) for name in expected)


def _lines_and_differences() -> list[tuple[list[str], int]]:
    return [lines_and_differences(flags, list(faults)) for flags, faults in CASES.items()]


def test_the_first_bad_number_is_reported_and_changes_no_state() -> None:
    for found in run_distributed(_lines_and_differences, 2):
        for (flags, expected), (lines, changed) in zip(CASES.items(), found, strict=True):
            for line, start in zip(lines, expected.values(), strict=True):
                assert line.startswith(start), (line, flags)
            assert changed == 0, flags


def _skipping() -> tuple[list[str], str, int]:
    """Lines about skipped iterations and an evaluation, the line about one too many, and the iterations done."""
    training = Training(PIPELINE, bad_numbers="skip", max_bad_numbers_in_a_row=2)
    Injection(training.engine, Fault(kind="loss", rank=1, iteration=2, iterations=2))
    Injection(training.engine, Fault(kind="loss", rank=1, iteration=5, iterations=9))
    try:
        while True:
            training.step()
    except BadIteration as error:
        evaluation = check_evaluation(NumbersConfig(bad_numbers="skip"), training.engine, "test", float("nan"))
        return [*training.lines, str(evaluation)], str(error), training.iteration


def test_bad_iterations_are_skipped_until_there_are_too_many_in_a_row() -> None:
    for lines, error, iteration in run_distributed(_skipping, 2):
        *skipped, evaluation = lines
        assert [line.partition(":")[0] for line in skipped] == [f" skipped iteration {each}" for each in (2, 3, 5, 6)]
        assert evaluation == " test: the loss is nan, and all weights are finite"
        assert iteration == 7
        assert "it is number 3 in a row" in error


def _bad_weight(flags: str, fault: Fault) -> list[str]:
    """Lines about a bad weight or state: of a step, an evaluation, a save or load, and a comparison of copies."""
    training = Training(flags)
    Injection(training.engine, fault)
    lines = []
    try:
        training.step()
        training.step()
        training.step()
    except NumbersError as error:
        lines.append(str(error))
    for check in (
        lambda: check_evaluation(NumbersConfig(), training.engine, "validation", float("nan") if lines else 1.0),
        lambda: refuse_bad_states(training.engine, "the model", "nothing was saved"),
        lambda: refuse_different_copies(training.engine, training.iteration, 0),
    ):
        try:
            check()
            lines.append("")
        except NumbersError as error:
            lines.append(str(error))
    return lines


def _bad_weights() -> list[list[str]]:
    return [
        _bad_weight(PIPELINE, Fault(kind="weight", rank=1, name="4.mlp.up", iteration=2)),
        _bad_weight("--zero-stage 1 --bf16", Fault(kind="state", rank=1, name="mlp.up", iteration=2)),
        _bad_weight("", Fault(kind="bit", rank=1, name="2.mlp.up.weight", iteration=2)),
        _bad_weight(TENSOR, Fault(kind="bit", rank=1, name="2.mlp_norm.weight", iteration=2)),
        _bad_weight(PIPELINE, Fault(kind="bit", rank=1, name="tied_modules", iteration=2)),
    ]


def test_bad_weights_and_states_and_different_copies_are_reported() -> None:
    weight, state, replica, uncut, tied = run_distributed(_bad_weights, 2)[0]
    named = "NaN or infinity in weight 4.mlp.up.weight on rank 1 (1 of "
    assert weight[0].startswith(f"iteration 2: the loss is nan, because of {named}")
    assert weight[1].startswith(f"validation: the loss is nan, because of {named}")
    assert weight[2].startswith(f"the model has {named}") and weight[2].endswith(": nothing was saved")
    assert state[0].startswith("iteration 3: the loss is nan, because of NaN or infinity in exp_avg of ")
    assert " on rank 1 (1 of " in state[0]
    for found, name, among in (
        (replica, "weight 2.mlp.up.weight on ranks 0, 1 differs", "replicas"),
        (uncut, "weight 2.mlp_norm.weight on ranks 0, 1 differs", "tensor-parallel ranks"),
        (tied, "weight tied_modules.", "tied stages"),
    ):
        (evaluated, refused, compared) = found
        assert evaluated == refused == "" and f"({among})" in compared
        assert name in compared or "more" in compared


def spikes_among(values: list[float]) -> list[int]:
    """Numbers of the values that are spikes, were they losses."""
    guard = SpikeGuard(NumbersConfig())
    return [number for number, value in enumerate(values) if guard.check(number, value, None)[0]]


def falling(count: int) -> list[float]:
    """Losses of a run that learns, with noise."""
    noise = random.Random(0)
    return [2 + 8 / (1 + 0.05 * number) + noise.gauss(0, 0.05) for number in range(count)]


JUMP = falling(400)
JUMP[300] *= 2


@pytest.mark.parametrize(
    ("values", "spikes"),
    [
        (falling(1000), []),
        (JUMP, [300]),
        ([2.0] * 200 + [4.0] * 200, [*range(200, 250)]),  # until half of the last 100 are so high
        ([1.0] * (LEAST_VALUES - 1) + [100.0], []),  # a few values give no bound
        ([1.0] * LEAST_VALUES + [100.0], [LEAST_VALUES]),
        ([2.0] * 50 + [2.13], []),  # nearly constant values may rise by the least ratio
        ([2.0] * 50 + [2.15], [50]),
    ],
    ids=["falling", "jump", "plateau", "too few", "enough", "small rise", "larger rise"],
)
def test_a_spike_is_far_above_the_usual(values: list[float], spikes: list[int]) -> None:
    assert spikes_among(values) == spikes


def test_spikes_are_noted_or_end_the_run() -> None:
    noted: list[str] = []
    for policy in ("note", "stop", "ignore"):
        guard = SpikeGuard(NumbersConfig(spiky_loss=policy, large_grads="ignore"))
        for iteration in range(1, 31):
            guard.check(iteration, 2.0, 1.0)
        found = guard.check(31, 20.0, 99.0)
        assert found == (policy != "ignore", False)
        if policy == "stop":
            with pytest.raises(NumbersError, match=r"loss of iteration 31 is 20, above 2\.14"):
                guard.report(noted.append)
        else:
            guard.report(noted.append)
    (line,) = noted
    assert line.startswith(" warning: the loss of iteration 31 is 20, above 2.14, ")


def test_nan_and_skipped_iterations_are_no_spikes_and_do_not_change_the_bound() -> None:
    guard = SpikeGuard(NumbersConfig(large_grads="note"))
    for iteration in range(1, 101):
        guard.check(iteration, 2.0, 1.0)
        assert guard.check(iteration, nan, None) == guard.check(iteration, inf, inf) == (False, False)
    found = [guard.check(101, *pair) for pair in ((2.0, 3.1), (2.0, 2.9), (9.0, 9.0))]
    assert found == [(False, True), (False, False), (True, True)]
