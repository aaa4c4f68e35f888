from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import SCHEDULES, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.solve.list_scheduler import anneal, list_schedule
from deepspeed_ext.plan.solve.orders import merged, optimise
from deepspeed_ext.plan.solve.problem import NumberedOrders, SchedulingProblem, keeps_limit, replay
from tests.plan.optimise.pipelines import problems

QUICK = 1e-3


def optimised(problem, **options):
    limit = None if problem.memory_limit == np.inf else problem.memory_limit
    options = {"effort": QUICK, "lengths": problem.lengths, "memory_limit": limit, **options}
    return optimise(problem.shape, problem.costs, **options)


@given(problems())
@settings(max_examples=25, deadline=None)
def test_what_is_found_runs_and_keeps_the_limit(problem):
    found = optimised(problem)
    check_complete(found.orders, problem.shape)
    timeline = simulate(found.orders, problem.shape, problem.costs)
    assert found.makespan == pytest.approx(timeline.makespan)
    assert found.bubble_ratio == pytest.approx(timeline.bubble_ratio, abs=1e-9)
    assert found.peak_activation == pytest.approx(peak_activation(timeline, problem.lengths))
    assert max(found.peak_activation) <= problem.memory_limit + 1e-9
    assert found.lower_bound <= found.makespan * (1 + 1e-9)
    programs = lower(found.schedule, problem.shape)
    assert [tuple(program.ops()) for program in programs] == list(found.orders)


@given(problems())
@settings(max_examples=25, deadline=None)
def test_gradients_add_up_in_the_order_of_all_schedules(problem):
    for order in optimised(problem).orders:
        for stage in {op.stage for op in order}:
            for kinds in ({OpKind.BACKWARD, OpKind.INPUT_GRADIENT}, {OpKind.BACKWARD, OpKind.WEIGHT_GRADIENT}):
                backward = [(op.micro_batch, -op.token_slice) for op in order if op.stage == stage and op.kind in kinds]
                assert all(before < after for before, after in pairwise(backward))


@given(problems())
@settings(max_examples=25, deadline=None)
def test_never_worse_than_a_fixed_schedule_that_keeps_the_limit(problem):
    found = optimised(problem)
    for schedule in SCHEDULES.values():
        try:
            timeline = simulate(rank_orders(schedule, problem.shape), problem.shape, problem.costs)
        except PlanError:  # not for these model chunks, or these costs
            continue
        if max(peak_activation(timeline, problem.lengths)) <= problem.memory_limit:
            assert found.makespan <= timeline.makespan * (1 + 1e-9)


@given(problems(is_split=False))
@settings(max_examples=10, deadline=None)
def test_backwards_stay_whole_where_costs_do_not_tell_their_parts(problem):
    kinds = {op.kind for order in optimised(problem).orders for op in order}
    assert kinds == {OpKind.FORWARD, OpKind.BACKWARD}


def test_the_same_arguments_give_the_same_orders():
    shape = PipelineShape(8, 4, 4, 2, Placement.V)
    costs = attention_costs(shape, [4, 3, 2, 2], 0.5)
    first, again = (optimise(shape, costs, memory_limit=1.75, lengths=[4, 3, 2, 2], effort=0.02) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0.5}, "memory limit 0.5 is less than one micro-batch"),
        ({"lengths": [1, 2, 3]}, r"lengths \[1, 2, 3\] for 2 token slices"),
        ({"effort": 0}, "effort 0 leaves no time to search"),
    ],
)
def test_what_cannot_be_optimised(options, message):
    shape = PipelineShape(2, 2, 2)
    with pytest.raises(PlanError, match=message):
        optimise(shape, OpCosts.uniform(shape), **options)


@given(problems(is_split=True), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_annealing_and_merging_keep_what_was_reached(problem, seed):
    priorities = np.random.default_rng(seed).random((3, problem.shape.num_stages, problem.num_units))
    # Whole backwards stand together wherever they can, so there is something to merge.
    priorities[2] = -1.0
    _, rows = list_schedule(problem, priorities, 0.0)
    orders = NumberedOrders.of(list(rows))
    makespan, annealed = anneal(problem, orders, 100, seed)
    assert makespan <= replay(problem, orders)
    assert replay(problem, annealed) == makespan
    joined = merged(problem, annealed)
    assert replay(problem, joined) <= makespan * (1 + 1e-9)
    assert joined.lengths.sum() <= annealed.lengths.sum()
    assert keeps_limit(problem, joined)


def test_annealing_repairs_one_op_out_of_place():
    shape = PipelineShape(4, 4, 1)
    problem = SchedulingProblem.of(shape, OpCosts.uniform(shape, weight_gradient=1.0))
    rows = problem.numbered(rank_orders(one_f_one_b, shape))
    best = replay(problem, NumberedOrders.of(rows))
    # The second forward of the last rank goes before its first backward, for which all others wait.
    rows[-1][[1, 2]] = rows[-1][[2, 1]]
    assert replay(problem, NumberedOrders.of(rows)) > best
    assert anneal(problem, NumberedOrders.of(rows), 500, 0)[0] <= best


def test_parts_that_stand_together_become_whole_where_nobody_waits():
    shape = PipelineShape(2, 1, 1)
    problem = SchedulingProblem.of(shape, OpCosts.uniform(shape, weight_gradient=1.0))
    rows = problem.numbered(rank_orders(zero_bubble, shape))
    first, last = problem.named(merged(problem, NumberedOrders.of(rows)).to_list())
    assert [op.kind for op in first] == [OpKind.FORWARD, OpKind.BACKWARD]
    assert [op.kind for op in last] == [OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT]
