"""Makespans: simulated, and extrapolated where there are very many micro-batches."""

import numpy as np
import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.search.price import simulated_time as playing
from megatron_terapipe.search.price.simulated_time import ScheduleSimulator


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


def test_what_transfers_take_is_apart() -> None:
    shape = PipelineShape(4, 8)
    rows = ((1.0,),) * 4
    simulated = ScheduleSimulator().simulate("1f1b", shape, OpCosts(rows, rows, None, 0.5))
    assert simulated.makespan_without_transfers == pytest.approx(2 * (8 + 3))
    assert simulated.makespan > simulated.makespan_without_transfers


def test_orders_that_are_found_beat_those_that_are_generated() -> None:
    shape = PipelineShape(4, 8)
    costs = uneven(shape, seed=3)
    found = ScheduleSimulator().simulate("optimised", shape, costs).makespan
    assert found <= min(ScheduleSimulator().simulate(name, shape, costs).makespan for name in ("1f1b", "zero-bubble"))
