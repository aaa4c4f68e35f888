"""Closed forms of pipelines against the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.cost.closed_form import lower_bound, pipeline_time, total_s
from megatron_terapipe.search.cost.simulated_time import ScheduleSimulator, closed_form_of
from megatron_terapipe.search.cost.stage_ops import StageOps

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def closed(schedule: str, shape: PipelineShape, tables: np.ndarray) -> tuple[float, float]:
    """Time in closed form, and bound, of ops [3, stages, S]: F, BI, BW."""
    forward, input_gradient, weight_gradient = tables
    parts = (forward, input_gradient + weight_gradient, input_gradient, weight_gradient, np.zeros_like(forward))
    ranks = shape.num_ranks
    per_rank = [part.sum(axis=1).reshape(shape.num_model_chunks, ranks).sum(axis=0) for part in parts]
    slowest = int(np.argmax(total_s(schedule, StageOps(*per_rank))))
    first = [part[: ranks - 1, 0].sum() for part in parts]
    estimate = pipeline_time(
        schedule,
        num_micro_batches=shape.num_micro_batches,
        num_token_slices=shape.num_token_slices,
        num_model_chunks=shape.num_model_chunks,
        slowest=StageOps(*(part[slowest] for part in per_rank)),
        others=StageOps(*(part.sum() - part[slowest] for part in per_rank)),
    )
    bound = lower_bound(
        schedule,
        num_micro_batches=shape.num_micro_batches,
        slowest=StageOps(*(part[slowest] for part in per_rank)),
        last=StageOps(*(part[-1] for part in per_rank)),
        fill=StageOps(*first),
    )
    return float(estimate), float(bound)


def simulated(schedule: str, shape: PipelineShape, tables: np.ndarray) -> float:
    rows = [tuple(map(tuple, table.tolist())) for table in tables]
    if schedule == "zero-bubble":
        costs = OpCosts(rows[0], rows[1], rows[2])
    else:
        whole = tuple(map(tuple, (tables[1] + tables[2]).tolist()))
        costs = OpCosts(rows[0], whole)
    return ScheduleSimulator().simulate(schedule, shape, costs).makespan


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, PipelineShape]:
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 6))
    model_chunks = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    token_slices = draw(st.integers(1, 4))
    micro_batches = draw(st.integers(1, 4)) * (ranks if model_chunks > 1 else 1)
    return schedule, PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)


@settings(max_examples=30, deadline=None)
@given(case=shapes(), seed=st.integers(0, 10**6))
def test_no_schedule_beats_the_bound(case: tuple[str, PipelineShape], seed: int) -> None:
    schedule, shape = case
    tables = np.random.default_rng(seed).uniform(0.1, 3.0, (3, shape.num_stages, shape.num_token_slices))
    _, bound = closed(schedule, shape, tables)
    assert bound <= simulated(schedule, shape, tables) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(case=shapes(), backward=st.floats(1.0, 2.0), weight=st.floats(0.3, 1.0))
def test_balanced_stages_are_priced_as_simulated(
    case: tuple[str, PipelineShape], backward: float, weight: float
) -> None:
    schedule, shape = case
    if shape.num_micro_batches * shape.num_token_slices < 2 * shape.num_ranks:
        shape = replace(shape, num_micro_batches=2 * shape.num_ranks)
    tables = np.array([1.0, backward, weight])[:, None, None] * np.ones((shape.num_stages, shape.num_token_slices))
    estimate, _ = closed(schedule, shape, tables)
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
