"""Orders and times of ops follow one table of dependencies, and one of live token slices."""

from collections.abc import Iterator

import pytest

from deepspeed_ext.plan import ops
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import LIVE_CHANGE, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import schedule_named
from deepspeed_ext.plan.simulate import arrays, simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.solve.list_scheduler import Priorities, PriorityRule, anneal, list_schedule
from deepspeed_ext.plan.solve.problem import SchedulingProblem, keeps_limit, peaks, replay

SHAPE = PipelineShape(num_stages=4, num_micro_batches=2, num_token_slices=2)
COSTS = OpCosts.uniform(SHAPE, weight_gradient=1.0, transfer=0.5)
RULE = PriorityRule(0.5, 0.5, 0.6, 0.5, 0.5, 0.1, 0.0)


@pytest.fixture(autouse=True)
def without_arrays_of_other_tables() -> Iterator[None]:
    """Forget the arrays of a shape, which are kept, once a test has changed the table."""
    yield
    forget_arrays()


def forget_arrays() -> None:
    arrays.data_flow.cache_clear()
    arrays.ways_of.cache_clear()


def makespans() -> tuple[float, float]:
    """Makespan of 1f1b, and of the order that a rule gives; all ways to find them agree."""
    forget_arrays()
    problem = SchedulingProblem.of(SHAPE, COSTS)
    fixed = CompiledOrders.of_schedule(schedule_named("1f1b"), SHAPE)
    makespan = replay(problem, fixed)
    listed, rows = list_schedule(problem, Priorities(problem).of(RULE), 0.0)
    annealed, better = anneal(problem, fixed, 200, seed=0)
    of_rule = CompiledOrders.of_numbers(list(rows), SHAPE)
    for orders, expected in ((fixed, makespan), (of_rule, listed), (better, annealed)):
        assert simulate(orders.orders, SHAPE, COSTS).makespan == expected
        assert orders.simulate(COSTS).makespan == expected
    return makespan, listed


@pytest.mark.parametrize("missing", ["stage", "token_slice"])
def test_a_dependency_that_is_taken_out_is_waited_for_nowhere(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    before = makespans()
    backward = (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
    table = [row for row in ops.DEPENDENCIES if not (row.op in backward and getattr(row, missing))]
    assert len(table) == len(ops.DEPENDENCIES) - 2
    received = {row.op: row for row in table if row.stage}
    by_kind = {kind: [row for row in table if row.op is kind] for kind in OpKind}
    monkeypatch.setattr(ops, "_BY_KIND", by_kind)
    monkeypatch.setattr(ops, "_RECEIVED", received)
    monkeypatch.setattr(ops, "_WAY", {row.needed: -row.stage for row in received.values()})
    after = makespans()
    if missing == "stage":
        assert after[0] < before[0] and after[1] < before[1]
    else:
        # Token slices may turn back in any order now, so they keep that of their forwards.
        assert not SchedulingProblem.of(SHAPE, COSTS).flow.is_reversed.any()


def test_live_token_slices_follow_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = CompiledOrders.of_schedule(schedule_named("zero-bubble"), SHAPE)

    def peaks_of_orders() -> tuple[float, ...]:
        forget_arrays()
        found = tuple(peaks(SchedulingProblem.of(SHAPE, COSTS), orders))
        assert found == pytest.approx(orders.peak_activation(), abs=1e-12)
        return found

    before = peaks_of_orders()
    freed_early = {**LIVE_CHANGE, OpKind.INPUT_GRADIENT: -1, OpKind.WEIGHT_GRADIENT: 0}
    monkeypatch.setattr(arrays, "LIVE_CHANGE", freed_early)
    assert sum(peaks_of_orders()) < sum(before)
    problem = SchedulingProblem.of(SHAPE, COSTS, memory_limit=1.0)
    late = PriorityRule(0.5, 0.5, 0.6, 0.5, 0.5, weight_delay=3.0, patience=0.0)
    _, rows = list_schedule(problem, Priorities(problem).of(late), 0.0)
    late_orders = CompiledOrders.of_numbers(list(rows), SHAPE)
    assert keeps_limit(problem, late_orders)
    # Weight gradients free no memory any more, so they may come after the forwards of other micro-batches.
    kinds = [op.kind for op in late_orders.order(0)]
    assert kinds[: 3 * SHAPE.num_token_slices].count(OpKind.WEIGHT_GRADIENT) == 0
