from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.solve.bound import lower_bound
from deepspeed_ext.plan.solve.list_scheduler import list_schedule
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.solve.problem import NumberedOrders, SchedulingProblem, keeps_limit, replay
from tests.plan.optimise.pipelines import problems


@given(problems(is_split=True), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_no_order_beats_it(problem, seed):
    priorities = np.random.default_rng(seed).random((3, problem.shape.num_stages, problem.num_units))
    makespan, _ = list_schedule(problem, priorities, 0.0)
    assert lower_bound(problem) <= makespan * (1 + 1e-9)


def shortest(problem):
    """By trying every order of two ranks with one stage each: all merges of the three queues."""
    queues = [0, 1, 2]
    units = problem.num_units
    merges = set(permutations([queue for queue in queues for _ in range(units)]))
    per_kind, token_slices = problem.shape.num_stages * units, problem.shape.num_token_slices

    def row(merge, stage):
        done = [0, 0, 0]
        ops = []
        for kind in merge:
            position = done[kind]
            unit = position if kind == 0 else position - 2 * (position % token_slices) + token_slices - 1
            ops.append(kind * per_kind + stage * units + unit)
            done[kind] += 1
        return np.array(ops)

    rows = [[row(merge, stage) for merge in merges] for stage in range(problem.shape.num_stages)]
    candidates = (NumberedOrders.of([first, second]) for first in rows[0] for second in rows[1])
    return min(replay(problem, orders) for orders in candidates if keeps_limit(problem, orders))


@pytest.mark.parametrize("memory_limit", [None, 1.0])
@pytest.mark.parametrize(("num_micro_batches", "num_token_slices"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_between_the_bound_and_what_is_found_lies_the_best(memory_limit, num_micro_batches, num_token_slices, seed):
    random = np.random.default_rng(seed)
    shape = PipelineShape(2, num_micro_batches, num_token_slices)
    tables = [tuple(map(tuple, random.uniform(0.5, 2, (2, num_token_slices)).tolist())) for _ in range(3)]
    costs = OpCosts(*tables, transfer=0.2)
    best = shortest(SchedulingProblem.of(shape, costs, memory_limit))
    found = optimise(shape, costs, memory_limit=memory_limit, effort=0.02)
    assert found.lower_bound <= best * (1 + 1e-12)
    assert found.makespan == pytest.approx(best)


def test_without_a_limit_and_with_work_enough_it_is_the_way_to_the_last_rank_and_its_work():
    shape = PipelineShape(8, 8, 8)
    lengths = [1] * 8
    bound = lower_bound(SchedulingProblem.of(shape, attention_costs(shape, lengths, 0.0)))
    assert bound == pytest.approx(8 * 3 + 7 / 8)


def test_memory_makes_it_longer():
    # All of a micro-batch must be given up before the next begins: what is left is one after the other on each rank.
    shape = PipelineShape(4, 3, 1)
    costs = OpCosts.uniform(shape, weight_gradient=1.0)
    # Without a limit: 4 F and 3 BI until the first gradient is back on rank 0, which then has 3 BI and 3 BW to do.
    assert lower_bound(SchedulingProblem.of(shape, costs)) == 4 + 3 + 3 + 3
    assert lower_bound(SchedulingProblem.of(shape, costs, 1.0)) == 3 * (4 + 4 + 1)


def test_memory_as_an_area():
    # Two model chunks in a V and room for one and a half micro-batches, with no work but the first forward.
    shape = PipelineShape(4, 8, 1, 2, Placement.V)
    costs = OpCosts(((1.0,),) * 4, ((1.0,),) * 4, ((0.0,),) * 4)
    held = 8 * (8 + 2) / 2
    assert lower_bound(SchedulingProblem.of(shape, costs, 1.0)) >= held
