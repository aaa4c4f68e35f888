"""Times of pipelines: closed forms against the simulator, makespans, and the end of an iteration."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.program import reductions
from megatron_terapipe.search.machine.software import Communication, Software
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, SOFTWARE, TERAPIPE
from megatron_terapipe.search.price import makespan as playing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.links import GroupTopology, ShardLinks, all_reduce_s
from megatron_terapipe.search.price.makespan import (
    FewerMicroBatches,
    Pipeline,
    ScheduleSimulator,
)
from megatron_terapipe.search.price.stages import StageOps
from megatron_terapipe.search.price.step import CoveringOps, StepCosts, exposed_reduction_s, step_costs

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "breadth-first")


def parts_of(tables: np.ndarray) -> np.ndarray:
    """Parts of `StageOps` but the last, [4, ...], of F, BI, BW [3, ...]."""
    forward, input_gradient, weight_gradient = tables
    return np.array([forward, input_gradient + weight_gradient, input_gradient, weight_gradient])


def pipeline_of(schedule: str, shape: PipelineShape) -> Pipeline:
    sizes = shape.num_model_chunks, shape.num_micro_batches, shape.num_token_slices
    return Pipeline(schedule, shape.num_ranks, *sizes)


def estimated(schedule: str, shape: PipelineShape, tables: np.ndarray) -> float:
    """Time in closed form of ops [3, stages, S]: F, BI, BW."""
    parts = parts_of(tables).sum(axis=2).reshape(4, shape.num_model_chunks, shape.num_ranks).sum(axis=1)
    return float(pipeline_of(schedule, shape).makespan_s(parts))


def bounds(schedule: str, shape: PipelineShape, tables: np.ndarray, message_s: float) -> list[float]:
    """Bounds of the same: of each rank, of each single stage, and of the first rank's round trips."""
    ranks, pipeline = shape.num_ranks, pipeline_of(schedule, shape)
    parts = parts_of(tables)
    whole = parts.sum(axis=2)
    before = np.cumsum(parts[:, :, 0], axis=1) - parts[:, :, 0] + message_s * np.arange(shape.num_stages)
    found = [
        pipeline.lower_bound_s(StageOps(*whole[:, rank::ranks].sum(axis=1)), StageOps(*before[:, rank]))
        for rank in range(ranks)
    ]
    if schedule in ("gpipe", "interleaved", "breadth-first"):
        stages = range(shape.num_stages)
        found += [pipeline.lower_bound_s(StageOps(*whole[:, stage]), StageOps(*before[:, stage])) for stage in stages]
    else:
        back = 2 if schedule == "zero-bubble" else 1
        forward, backward = parts[[0, back], :, -1].sum(axis=1) + message_s * (ranks - 1)
        found.append(
            pipeline.round_trip_bound_s(
                filling_s=parts[0, 0, :-1].sum(),
                forward_s=forward,
                backward_s=backward,
                last=(whole[0, -1], whole[back, -1]),
                draining_s=before[back, -1],
            )
        )
    return [float(each) for each in found]


def simulated(schedule: str, shape: PipelineShape, tables: np.ndarray, message_s: float = 0.0) -> float:
    rows = [tuple(map(tuple, table.tolist())) for table in tables]
    if schedule == "zero-bubble":
        costs = OpCosts(rows[0], rows[1], rows[2], message_s)
    else:
        whole = tuple(map(tuple, (tables[1] + tables[2]).tolist()))
        costs = OpCosts(rows[0], whole, None, message_s)
    return ScheduleSimulator().simulate(schedule, shape, costs).makespan


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, PipelineShape]:
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 6))
    model_chunks = draw(st.integers(1, 3)) if schedule in ("interleaved", "breadth-first") else 1
    token_slices = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 4)) * (ranks if model_chunks > 1 else 1)
    return schedule, PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)


@settings(max_examples=150, deadline=None)
@given(
    case=shapes(), micro_batches=st.integers(1, 12), message_s=st.sampled_from([0.0, 0.7]), seed=st.integers(0, 10**6)
)
def test_no_schedule_beats_the_bounds(
    case: tuple[str, PipelineShape], micro_batches: int, message_s: float, seed: int
) -> None:
    schedule, shape = case
    if shape.num_model_chunks == 1:
        shape = replace(shape, num_micro_batches=micro_batches)
    message_s *= shape.num_ranks > 1
    tables = np.random.default_rng(seed).uniform(0.1, 3.0, (3, shape.num_stages, shape.num_token_slices))
    makespan = simulated(schedule, shape, tables, message_s)
    assert max(bounds(schedule, shape, tables, message_s)) <= makespan * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "shape", "message_s"),
    [
        ("1f1b", PipelineShape(4, 8, 2), 0.0),
        ("gpipe", PipelineShape(4, 3, 2), 0.5),
        ("interleaved", PipelineShape(12, 1, 1, 3), 0.5),  # one micro-batch passes all stages, one after the other
        ("zero-bubble", PipelineShape(8, 32, 1), 0.0),
    ],
)
def test_bounds_of_equal_stages_are_reached(schedule: str, shape: PipelineShape, message_s: float) -> None:
    tables = np.ones((3, shape.num_stages, shape.num_token_slices))
    makespan = simulated(schedule, shape, tables, message_s)
    assert max(bounds(schedule, shape, tables, message_s)) == pytest.approx(makespan, rel=1e-9)


def test_round_trips_bound_the_first_rank() -> None:
    """With long messages and two token slices the first rank cannot run ahead far enough."""
    shape = PipelineShape(8, 24, 2)
    tables = np.ones((3, shape.num_stages, shape.num_token_slices))
    *ranks, trips = bounds("zero-bubble", shape, tables, 2.0)
    makespan = simulated("zero-bubble", shape, tables, 2.0)
    assert max(ranks) < 0.85 * makespan < 0.9 * makespan < trips


@settings(max_examples=30, deadline=None)
@given(case=shapes(), backward=st.floats(1.0, 2.0), weight=st.floats(0.3, 1.0))
def test_balanced_stages_are_priced_as_simulated(
    case: tuple[str, PipelineShape], backward: float, weight: float
) -> None:
    schedule, shape = case
    if shape.num_micro_batches * shape.num_token_slices < 2 * shape.num_ranks:
        shape = replace(shape, num_micro_batches=2 * shape.num_ranks)
    tables = np.array([1.0, backward, weight])[:, None, None] * np.ones((shape.num_stages, shape.num_token_slices))
    estimate = estimated(schedule, shape, tables)
    # Zero-bubble's order is that of equal F, BI and BW; others leave a little more of a bubble.
    assert estimate == pytest.approx(
        simulated(schedule, shape, tables), rel=0.06 if schedule == "zero-bubble" else 0.03
    )


def test_twice_the_activations_hide_twice_the_drain() -> None:
    def makespan(limit: float) -> float:
        ops = np.array([1.0, 2.0, 1.0, 1.0])[:, None]
        return float(Pipeline("zero-bubble", 8, 1, 24, 1).makespan_s(ops, np.array([8.0]), activation_limit=limit))

    # arXiv 2401.10241 table 1: bubbles of 1F1B, ZB-H1 and ZB-H2 are (p-1) times F + BI + BW - ..., see `Pipeline`.
    assert makespan(1.0) == pytest.approx(24 * 3 + 7 * 1)
    assert makespan(2.0) == pytest.approx(24 * 3)


def uneven(shape: PipelineShape, seed: int = 0) -> OpCosts:
    draw = np.random.default_rng(seed).uniform(0.5, 2.0, (3, shape.num_stages, shape.num_token_slices))
    forward, backward, weight = (tuple(map(tuple, table.tolist())) for table in draw)
    return OpCosts(forward, backward, weight)


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("1f1b", PipelineShape(4, 203)),
        ("gpipe", PipelineShape(3, 150, 2)),
        ("interleaved", PipelineShape(8, 128, 1, 2)),
        ("interleaved", PipelineShape(6, 101, 2, 2)),
        ("zero-bubble", PipelineShape(4, 160)),
    ],
)
def test_the_rest_is_a_straight_line(schedule: str, shape: PipelineShape, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = uneven(shape)
    exact = ScheduleSimulator().simulate(schedule, shape, costs)
    assert not exact.notes
    monkeypatch.setattr(playing, "MOST_OPS", 500)
    extrapolated = ScheduleSimulator().simulate(schedule, shape, costs)
    assert "extrapolated" in extrapolated.notes[0]
    assert extrapolated.makespan == pytest.approx(exact.makespan, rel=2e-3)


def test_an_optimised_order_of_the_longer_search_is_priced_whole() -> None:
    costs = uneven(PipelineShape(2, 1))
    few, many = FewerMicroBatches.of(PipelineShape(2, 100), 0, 2).numbers
    shapes = PipelineShape(2, few), PipelineShape(2, many)
    shorter, longer = (ScheduleSimulator().simulate("optimised", shape, costs) for shape in shapes)
    assert longer.makespan > shorter.makespan * (1 + 1 / few) and not longer.notes


def test_the_makespan_without_transfers() -> None:
    shape = PipelineShape(4, 8)
    rows = ((1.0,),) * 4
    simulated = ScheduleSimulator().simulate("1f1b", shape, OpCosts(rows, rows, None, 0.5))
    assert simulated.makespan_without_transfers == pytest.approx(2 * (8 + 3))
    assert simulated.makespan > simulated.makespan_without_transfers


FREE = HardwareEfficiency(
    collective_s=0.0, collective_fill_s=0.0, inside_efficiency=1.0, memory_efficiency=1.0, optimizer_passes=1.0
)
FOUR = GroupTopology(4, 1, 1e9, 0.0, 1e9, 0.0)
TWO = FOUR._replace(size=2)
OVERLAPPED = Communication(overlaps_gradient_reduction=True)
GATHERED_S = 3 / 4 * 1e6 / 1e9
"""One million bytes, each of four ranks having a part, at 1 GB/s."""


def step(precision: str, zero_stage: int, software: Software = TERAPIPE, shared: float = 0.0) -> StepCosts:
    kind = {"zero_stage": zero_stage, "precision": precision, "software": software}
    return step_costs(1e6, shared, ShardLinks(FOUR), TWO, 1e12, efficiency=FREE, **kind)


@pytest.mark.parametrize(
    ("software", "precision", "zero_stage", "reduced_bytes", "reduces_to_all", "gathered_bytes"),
    [
        # As DeepSpeed sends them.
        (TERAPIPE, "bf16", 0, 2, True, 2),
        (TERAPIPE, "bf16", 1, 4, True, 2),
        (TERAPIPE, "fp16", 1, 2, False, 2),
        (TERAPIPE, "fp16", 0, 2, True, 0),
        (TERAPIPE, "fp32", 1, 4, False, 4),
        (TERAPIPE, "fp32", 0, 4, True, 0),
        *((MEGATRON_LM, precision, 0, 2, True, 0) for precision in ("bf16", "fp16")),
        *((MEGATRON_LM, precision, 1, 2, False, 2) for precision in ("bf16", "fp16")),
    ],
)
def test_bytes_of_gradients_and_stepped_weights(
    software: Software, precision: str, zero_stage: int, reduced_bytes: int, reduces_to_all: bool, gathered_bytes: int
) -> None:
    found = step(precision, zero_stage, software)
    assert found.gradient_reduction == pytest.approx(reduced_bytes * (1 + reduces_to_all) * GATHERED_S)
    assert found.weight_gather == pytest.approx(gathered_bytes * GATHERED_S)


def test_shards_are_reduced_over_their_copies() -> None:
    kind = {"zero_stage": 3, "precision": "bf16", "software": SOFTWARE["fsdp"], "efficiency": FREE}
    whole = step_costs(1e6, 0.0, ShardLinks(FOUR), TWO, 1e12, **kind)
    parts = step_costs(1e6, 0.0, ShardLinks(FOUR, TWO), TWO, 1e12, **kind)
    assert parts.weight_gather == whole.weight_gather and parts.optimizer == whole.optimizer
    assert parts.gradient_reduction - whole.gradient_reduction == pytest.approx(all_reduce_s(4 * 1e6 / 4, TWO, FREE))


def test_bf16_is_stepped_in_parts_at_every_zero_stage() -> None:
    def stepped(precision: str, zero_stage: int) -> float:
        """Seconds without the part of the step on all gradients of the rank."""
        whole = TERAPIPE.state(precision, zero_stage).whole_step
        return float(step(precision, zero_stage).optimizer) - whole * 1e6 / 1e12

    part = stepped("fp32", 1)
    assert (stepped("bf16", 0), stepped("bf16", 1), stepped("fp32", 0)) == pytest.approx((part, part, 4 * part))


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
    stages=st.integers(1, 4),
    group=st.integers(1, 3),
)
def test_exposed_reductions_are_those_of_the_simulated_plan(
    reduction: float, op: float, layers: int, cool_down: float, late: float, stages: int, group: int
) -> None:
    pipeline = Pipeline("interleaved", group, stages, 8, 1)
    completed = {
        stage: (op * group * (stages - 1 - stage), op * (1 + group * (stages - 1 - stage)))
        for stage in reversed(range(stages))
    }
    pieces = [(reduction / stages / layers,) * layers] * stages
    *_, last = reductions(completed, pieces, PipelineShape(stages, 8, num_model_chunks=stages))
    step, ops = StepCosts(reduction + late, 0.0, 0.0, late), CoveringOps(op, 0.0, op, layers, pipeline)
    shown = exposed_reduction_s(step, ops, OVERLAPPED, replace(FREE, overlap_exposed=0.0), cool_down, zero_stage=1)
    after = max(last.end - completed[0][1] - cool_down, 0)
    assert shown == pytest.approx(after + late)
    # Hidden parts slow the ops nevertheless.
    disturbed = exposed_reduction_s(step, ops, OVERLAPPED, replace(FREE, overlap_exposed=0.25), cool_down, zero_stage=1)
    assert disturbed - shown == pytest.approx((reduction - after) / 4)


GATHERS = Communication(overlaps_weight_gather=True)


@pytest.mark.parametrize(
    ("communication", "gather", "reduction", "zero_stage", "shown"),
    [
        (Communication(), 1.0, 0.0, 1, 1.0),
        # Only the first layer of a gather that fits under the forward is exposed.
        (GATHERS, 1.0, 0.0, 1, 0.25),
        (GATHERS, 4.0, 0.0, 1, 1.0 + (3.0 - 2.0)),
        # Sharded weights are gathered twice in each micro-batch: all of it fits under the ops, but for the first
        # layer's gather and the last one's reduction.
        (Communication(), 1.0, 1.0, 3, 2 / 4),
        # Of each forward 1 s more, of each backward 2 s more.
        (Communication(), 3.0, 3.0, 3, 2 * (1 + 2) + 6 / 4),
    ],
)
def test_exposed_seconds_of_two_micro_batches(
    communication: Communication, gather: float, reduction: float, zero_stage: int, shown: float
) -> None:
    """Of a forward of 2 s and a backward of 4 s, in four layers."""
    step = StepCosts(reduction, 0.0, 0.0, weight_gather=gather)
    ops = CoveringOps(completing=4.0, forward=2.0, backward=4.0, layers=4, pipeline=Pipeline("1f1b", 1, 1, 2, 1))
    free = replace(FREE, overlap_exposed=0.0)
    assert exposed_reduction_s(step, ops, communication, free, zero_stage=zero_stage) == pytest.approx(shown)
