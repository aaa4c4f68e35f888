"""Closed forms of pipelines against the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.price.batch import lower_bound, pipeline_time, round_trip_bound, total_s
from megatron_terapipe.search.price.simulated_time import ScheduleSimulator, closed_form_of
from megatron_terapipe.search.price.stages import StageOps

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "breadth-first")


def parts_of(tables: np.ndarray) -> np.ndarray:
    """Parts of `StageOps` but the last, [4, ...], of F, BI, BW [3, ...]."""
    forward, input_gradient, weight_gradient = tables
    return np.array([forward, input_gradient + weight_gradient, input_gradient, weight_gradient])


def estimated(schedule: str, shape: PipelineShape, tables: np.ndarray) -> float:
    """Time in closed form of ops [3, stages, S]: F, BI, BW."""
    parts = parts_of(tables).sum(axis=2).reshape(4, shape.num_model_chunks, shape.num_ranks).sum(axis=1)
    slowest = int(np.argmax(total_s(schedule, StageOps(*parts))))
    return float(
        pipeline_time(
            schedule,
            num_micro_batches=shape.num_micro_batches,
            num_token_slices=shape.num_token_slices,
            num_model_chunks=shape.num_model_chunks,
            slowest=StageOps(*parts[:, slowest]),
            others=StageOps(*(parts.sum(axis=1) - parts[:, slowest])),
        )
    )


def bounds(schedule: str, shape: PipelineShape, tables: np.ndarray, message_s: float) -> list[float]:
    """Bounds of the same: of each rank, of each stage alone, and of the first rank's round trips."""
    ranks, count, token_slices = shape.num_ranks, shape.num_micro_batches, shape.num_token_slices
    parts = parts_of(tables)
    whole = parts.sum(axis=2)
    before = np.cumsum(parts[:, :, 0], axis=1) - parts[:, :, 0] + message_s * np.arange(shape.num_stages)
    put_off = [
        (rank + 1) // token_slices * whole[3, rank]
        + min((rank + 1) % token_slices * parts[3, rank].max(), whole[3, rank])
        for rank in range(ranks)
    ]
    found = [
        lower_bound(
            schedule,
            num_micro_batches=count,
            ops=StageOps(*whole[:, rank::ranks].sum(axis=1)),
            before=StageOps(*before[:, rank]),
            deferred_s=put_off[rank],
        )
        for rank in range(ranks)
    ]
    if schedule in ("gpipe", "interleaved", "breadth-first"):
        stages = range(shape.num_stages)
        found += [
            lower_bound(
                schedule,
                num_micro_batches=count,
                ops=StageOps(*whole[:, stage]),
                before=StageOps(*before[:, stage]),
            )
            for stage in stages
        ]
    else:
        back = 2 if schedule == "zero-bubble" else 1
        there_and_back = parts[:, :, -1].sum(axis=1) + message_s * (ranks - 1)
        found.append(
            round_trip_bound(
                schedule,
                num_ranks=ranks,
                num_micro_batches=np.array(float(count)),
                num_token_slices=np.array(float(token_slices)),
                filling_s=parts[0, 0, :-1].sum(),
                forward_s=there_and_back[0],
                backward_s=there_and_back[back],
                last=StageOps(*whole[:, -1]),
                draining_s=before[back, -1],
                deferred_s=put_off[-1],
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


def test_a_first_rank_that_waits_for_round_trips_is_seen() -> None:
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
    shape = PipelineShape(8, 24)
    rows = ((1.0,),) * 8
    costs = OpCosts(rows, rows, rows)
    # arXiv 2401.10241 table 1: bubbles of 1F1B, ZB-H1 and ZB-H2 are (p-1) times F + BI + BW - ..., see closed_form.
    assert closed_form_of(shape, costs, 1.0).makespan == pytest.approx(24 * 3 + 7 * 1)
    assert closed_form_of(shape, costs, 2.0).makespan == pytest.approx(24 * 3)
