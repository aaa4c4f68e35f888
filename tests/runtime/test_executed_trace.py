"""The measured timeline of the engine has the ops of the schedule, in its order."""

from functools import cache
from itertools import pairwise

import pytest

from deepspeed_ext.plan.ops import PipelineShape, prerequisites, result
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders
from deepspeed_ext.plan.timeline import Timeline, executed_order
from tests.distributed import run_each
from tests.pairs import covering_pairs
from tests.runtime.training import Setup, build, feed

CLOCK_RESOLUTION_S = 1e-6
"""Rounding of a difference of two readings of the host's clock."""

_ALL = [
    Setup(pp=pp, cut=cut, micro_batches=micro_batches, schedule=schedule, model_chunks=model_chunks, num_blocks=6)
    for pp in (1, 2, 4)
    for schedule, model_chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1))
    for cut, micro_batches in (((9, 1, 8, 6), 3), ((24,), 5), ((12, 12), 1))
]
SETUPS = [_ALL[index] for index in covering_pairs([{**vars(each), "model_chunks": None} for each in _ALL])]


def _timeline(setup: Setup) -> tuple[str, float]:
    """The timeline, and when this rank's clock started by the clock that all ranks of a host share."""
    engine = build(setup)
    engine.train_batch(feed(engine, setup))
    with engine.timeline() as timelines:
        started = engine.observers._members[-1]._origin
        engine.train_batch(feed(engine, setup))
    (timeline,) = timelines
    return timeline.to_json(), started


@cache
def _measured(pp: int) -> dict[Setup, tuple[Timeline, list[float]]]:
    setups = [setup for setup in SETUPS if setup.pp == pp]
    measured = {}
    for setup, ranks in zip(setups, run_each(_timeline, pp, setups), strict=True):
        (text,) = {text for text, _ in ranks}  # every rank gets the whole timeline
        measured[setup] = Timeline.from_json(text), [started for _, started in ranks]
    return measured


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_executed_order_is_the_schedule_and_keeps_its_dependencies(setup: Setup) -> None:
    timeline, started = _measured(setup.pp)[setup]
    shape = PipelineShape(setup.pp * setup.model_chunks, setup.micro_batches, len(setup.cut), setup.model_chunks)
    assert (timeline.shape, timeline.unit) == (shape, "s")
    assert executed_order(timeline) == rank_orders(SCHEDULES[setup.schedule], shape)
    results = {result(span.op): span for rank in timeline.spans for span in rank}
    clock = [started[shape.rank_of(stage)] for stage in range(shape.num_stages)]
    for rank in timeline.spans:
        assert all(span.start < span.end for span in rank)
        assert all(earlier.end <= later.start for earlier, later in pairwise(rank))
        for op, start, _ in rank:
            for needed in prerequisites(op, shape):
                done = clock[needed.stage] + results[needed].end
                assert done <= clock[op.stage] + start + CLOCK_RESOLUTION_S, f"{op} ran before {needed} was done"
