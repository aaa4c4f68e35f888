"""The end of an iteration."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.program import reductions
from megatron_terapipe.search.machine.software import Communication, Software
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.links import GroupTopology
from megatron_terapipe.search.price.step import CoveringOps, StepCosts, shown_reduction_s, step_costs

FREE = HardwareEfficiency(collective_s=0.0, inside_efficiency=1.0, memory_efficiency=1.0, optimizer_passes=1.0)
FOUR = GroupTopology(4, 1, 1e9, 0.0, 1e9, 0.0)
TWO = FOUR._replace(size=2)
OVERLAPPED = Communication(overlaps_gradient_reduction=True)
GATHERED_S = 3 / 4 * 1e6 / 1e9
"""One million bytes, each of four ranks having a part, at 1 GB/s."""


def step(precision: str, zero_stage: int, software: Software = TERAPIPE, shared: float = 0.0) -> StepCosts:
    return step_costs(
        1e6, shared, FOUR, TWO, 1e12, zero_stage=zero_stage, precision=precision, software=software, efficiency=FREE
    )


@pytest.mark.parametrize(
    ("precision", "zero_stage", "reduced_bytes", "reduces_to_all", "gathered_bytes"),
    [
        ("bf16", 0, 2, True, 2),
        ("bf16", 1, 4, True, 2),
        ("fp16", 1, 2, False, 2),
        ("fp16", 0, 2, True, 0),
        ("fp32", 1, 4, False, 4),
        ("fp32", 0, 4, True, 0),
    ],
)
def test_gradients_travel_as_deepspeed_sends_them(
    precision: str, zero_stage: int, reduced_bytes: int, reduces_to_all: bool, gathered_bytes: int
) -> None:
    found = step(precision, zero_stage)
    assert found.gradient_reduction == pytest.approx(reduced_bytes * (1 + reduces_to_all) * GATHERED_S)
    assert found.weight_gather == pytest.approx(gathered_bytes * GATHERED_S)


def test_bf16_is_stepped_in_parts_at_every_zero_stage() -> None:
    def stepped(precision: str, zero_stage: int) -> float:
        """Seconds without what the step does to all gradients of the rank."""
        whole = TERAPIPE.state(precision, zero_stage).whole_step_bytes
        return float(step(precision, zero_stage).optimizer) - whole * 1e6 / 1e12

    part = stepped("fp32", 1)
    assert (stepped("bf16", 0), stepped("bf16", 1), stepped("fp32", 0)) == pytest.approx((part, part, 4 * part))


def test_every_rank_takes_the_norm_of_whole_gradients() -> None:
    assert TERAPIPE.state("bf16", 1).whole_step_bytes == 12
    beside = step("bf16", 1).optimizer - step("fp32", 1).optimizer
    assert beside == pytest.approx(12 * 1e6 / 1e12)


def test_other_trainers_say_how_much_they_reduce() -> None:
    for precision in ("bf16", "fp16"):
        assert step(precision, 0, MEGATRON_LM).gradient_reduction == pytest.approx(2 * 2 * GATHERED_S)
        found = step(precision, 1, MEGATRON_LM)
        assert (found.gradient_reduction, found.weight_gather) == pytest.approx((2 * GATHERED_S, 2 * GATHERED_S))


def test_a_shared_weight_is_reduced_between_the_ends() -> None:
    assert step("bf16", 1).shared_weight == 0
    # Two ranks: half of the bytes, there and back.
    assert step("bf16", 1, shared=1e6).shared_weight == pytest.approx(4 * 1e6 / 1e9)
    assert step("bf16", 0, shared=1e6).shared_weight == pytest.approx(2 * 1e6 / 1e9)


@given(
    reduction=st.floats(0.01, 10),
    op=st.floats(0, 10),
    layers=st.integers(1, 6),
    cool_down=st.floats(0, 5),
    late=st.floats(0, 2),
)
def test_what_shows_of_a_reduction_is_what_the_plan_plays(
    reduction: float, op: float, layers: int, cool_down: float, late: float
) -> None:
    *_, last = reductions({0: (0.0, op)}, [(reduction / layers,) * layers], PipelineShape(1, 1))
    step, ops = StepCosts(reduction + late, 0.0, 0.0, late), CoveringOps(op, 0.0, op, layers, 1)
    shown = shown_reduction_s(step, ops, OVERLAPPED, replace(FREE, overlap_exposed=0.0), cool_down)
    after = max(last.end - op - cool_down, 0)
    assert shown == pytest.approx(after + late)
    # What is hidden takes something from the ops all the same.
    disturbed = shown_reduction_s(step, ops, OVERLAPPED, replace(FREE, overlap_exposed=0.25), cool_down)
    assert disturbed - shown == pytest.approx((reduction - after) / 4)


def test_a_shared_weight_is_late() -> None:
    assert step("fp32", 0).late == 0
    assert step("fp32", 0, shared=5e5).late == pytest.approx(4 * GATHERED_S)


def shown(communication: Communication, gather: float, reduction: float = 0.0) -> float:
    """Seconds that show beside two micro-batches of a forward of 2 s and a backward of 4 s, in four layers."""
    step = StepCosts(reduction, 0.0, 0.0, weight_gather=gather)
    ops = CoveringOps(completing=4.0, forward=2.0, backward=4.0, layers=4, num_micro_batches=2)
    return float(shown_reduction_s(step, ops, communication, replace(FREE, overlap_exposed=0.0)))


def test_gathers_under_the_next_forward_show_their_first_layer_alone() -> None:
    assert shown(Communication(), gather=1.0) == 1.0
    gathers = Communication(overlaps_weight_gather=True)
    assert shown(gathers, gather=1.0) == 0.25
    assert shown(gathers, gather=4.0) == 1.0 + (3.0 - 2.0)


def test_sharded_weights_are_gathered_twice_in_each_micro_batch() -> None:
    sharded = Communication(shards_weights=True)
    # All of it fits under the ops, but for the first layer's gather and the last one's reduction.
    assert shown(sharded, gather=1.0, reduction=1.0) == pytest.approx(2 / 4)
    # Of each forward 1 s more, of each backward 2 s more.
    assert shown(sharded, gather=3.0, reduction=3.0) == pytest.approx(2 * (1 + 2) + 6 / 4)
