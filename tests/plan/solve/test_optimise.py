"""Orders that are found: they run, keep the limit, and are between the bound and the fixed schedules."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts, attention_costs
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import SCHEDULES, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.solve.bound import lower_bound
from deepspeed_ext.plan.solve.list_scheduler import anneal, list_schedule
from deepspeed_ext.plan.solve.orders import merged, optimise
from deepspeed_ext.plan.solve.problem import SchedulingProblem, keeps_limit, peaks, replay
from tests.strategies import shapes

QUICK = 1e-3
times = st.floats(0.01, 10.0)


def each(count: int):
    """A time for each of so many things."""
    return st.tuples(*[times] * count)


@st.composite
def problems(draw, is_split=None):
    """Every placement, uneven costs, slow links, memory limits."""
    shape: PipelineShape = draw(shapes(4, 4, 4, 3, tuple(Placement)))
    tables = [draw(st.tuples(*[each(shape.num_token_slices)] * shape.num_stages)) for _ in range(3)]
    if is_split is None:
        is_split = draw(st.booleans())
    links = st.builds(TransferCosts, each(shape.last_stage), each(shape.last_stage), each(shape.num_token_slices))
    costs = OpCosts(tables[0], tables[1], tables[2] if is_split else None, draw(st.sampled_from([0.0, 0.3]) | links))
    memory_limit = draw(st.none() | st.floats(1.0, 3.0))
    lengths = draw(st.lists(st.integers(1, 9), min_size=shape.num_token_slices, max_size=shape.num_token_slices))
    return SchedulingProblem.of(shape, costs, memory_limit, lengths)


def optimised(problem, **options):
    limit = None if problem.memory_limit == np.inf else problem.memory_limit
    options = {"effort": QUICK, "lengths": problem.lengths, "memory_limit": limit, **options}
    return optimise(problem.shape, problem.costs, **options)


def drawn(problem, seed):
    return np.random.default_rng(seed).random((3, problem.shape.num_stages, problem.num_units))


@given(problems())
@settings(max_examples=40, deadline=None)
def test_orders_are_complete_end_keep_the_limit_and_are_no_worse_than_fixed_schedules(problem):
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
    # Gradients add up in one order (ADR 5).
    for order in found.orders:
        for stage in {op.stage for op in order}:
            for kinds in ({OpKind.BACKWARD, OpKind.INPUT_GRADIENT}, {OpKind.BACKWARD, OpKind.WEIGHT_GRADIENT}):
                backward = [(op.micro_batch, -op.token_slice) for op in order if op.stage == stage and op.kind in kinds]
                assert all(before < after for before, after in pairwise(backward))
    for schedule in SCHEDULES.values():
        try:
            timeline = simulate(rank_orders(schedule, problem.shape), problem.shape, problem.costs)
        except PlanError:  # not for these model chunks, or these costs
            continue
        if max(peak_activation(timeline, problem.lengths)) <= problem.memory_limit:
            assert found.makespan <= timeline.makespan * (1 + 1e-9)


@given(problems(is_split=False))
@settings(max_examples=10, deadline=None)
def test_backwards_stay_whole_where_costs_have_no_separate_weight_gradients(problem):
    kinds = {op.kind for order in optimised(problem).orders for op in order}
    assert kinds == {OpKind.FORWARD, OpKind.BACKWARD}


def test_the_same_arguments_give_the_same_orders():
    shape = PipelineShape(8, 4, 4, 2, Placement.V)
    costs = attention_costs(shape, [4, 3, 2, 2], 0.5)
    first, again = (optimise(shape, costs, memory_limit=1.75, lengths=[4, 3, 2, 2], effort=0.02) for _ in range(2))
    assert first == again


@given(problems(is_split=True), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_annealing_and_merging_never_lengthen_an_order(problem, seed):
    priorities = drawn(problem, seed)
    # Parts of backwards are neighbours wherever they can, so that some can be merged.
    priorities[2] = -1.0
    _, rows = list_schedule(problem, priorities, 0.0)
    orders = CompiledOrders.of_numbers(list(rows), problem.shape)
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
    rows = CompiledOrders.of_schedule(one_f_one_b, shape).numbers()
    best = replay(problem, CompiledOrders.of_numbers(rows, shape))
    # The second forward of the last rank goes before its first backward, for which all others wait.
    rows[-1][[1, 2]] = rows[-1][[2, 1]]
    assert replay(problem, CompiledOrders.of_numbers(rows, shape)) > best
    assert anneal(problem, CompiledOrders.of_numbers(rows, shape), 500, 0)[0] <= best


def test_neighbouring_parts_become_whole_where_no_rank_waits():
    shape = PipelineShape(2, 1, 1)
    problem = SchedulingProblem.of(shape, OpCosts.uniform(shape, weight_gradient=1.0))
    rows = CompiledOrders.of_schedule(zero_bubble, shape).numbers()
    first, last = merged(problem, CompiledOrders.of_numbers(rows, shape)).orders
    assert [op.kind for op in first] == [OpKind.FORWARD, OpKind.BACKWARD]
    assert [op.kind for op in last] == [OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT]


@given(problems(is_split=True), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1e9]))
@settings(max_examples=100, deadline=None)
def test_any_priorities_give_complete_orders_within_the_limit(problem, seed, patience):
    makespan, rows = list_schedule(problem, drawn(problem, seed), patience)
    orders = CompiledOrders.of_numbers(list(rows), problem.shape).orders
    check_complete(orders, problem.shape)
    timeline = simulate(orders, problem.shape, problem.costs)
    assert max(peak_activation(timeline, problem.lengths)) <= problem.memory_limit + 1e-9
    assert lower_bound(problem) <= makespan * (1 + 1e-9)
    # With patience a rank waits for its next op; the simulator does not wait for less.
    assert abs(timeline.end - makespan) <= 1e-9 * makespan


@given(problems(is_split=True), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_replay_equals_the_simulator(problem, seed):
    _, rows = list_schedule(problem, drawn(problem, seed), 0.0)
    orders = CompiledOrders.of_numbers(list(rows), problem.shape)
    timeline = simulate(CompiledOrders.of_numbers(list(rows), problem.shape).orders, problem.shape, problem.costs)
    assert replay(problem, orders) == timeline.end
    expected = peak_activation(timeline, problem.lengths)
    assert np.allclose(peaks(problem, orders), expected, rtol=0, atol=1e-12)


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
    candidates = (CompiledOrders.of_numbers([first, second], problem.shape) for first in rows[0] for second in rows[1])
    return min(replay(problem, orders) for orders in candidates if keeps_limit(problem, orders))


@pytest.mark.parametrize(("memory_limit", "seed"), [(None, 0), (1.0, 1)])
@pytest.mark.parametrize(("num_micro_batches", "num_token_slices"), [(2, 1), (1, 2)])
def test_the_best_order_is_found_and_not_below_the_bound(memory_limit, num_micro_batches, num_token_slices, seed):
    random = np.random.default_rng(seed)
    shape = PipelineShape(2, num_micro_batches, num_token_slices)
    tables = [tuple(map(tuple, random.uniform(0.5, 2, (2, num_token_slices)).tolist())) for _ in range(3)]
    costs = OpCosts(*tables, transfer=0.2)
    best = shortest(SchedulingProblem.of(shape, costs, memory_limit))
    found = optimise(shape, costs, memory_limit=memory_limit, effort=0.02)
    assert found.lower_bound <= best * (1 + 1e-12)
    assert found.makespan == pytest.approx(best)


def test_the_bound_with_enough_work_is_the_start_of_the_last_rank_and_its_work():
    shape = PipelineShape(8, 8, 8)
    lengths = [1] * 8
    bound = lower_bound(SchedulingProblem.of(shape, attention_costs(shape, lengths, 0.0)))
    assert bound == pytest.approx(8 * 3 + 7 / 8)


def test_a_memory_limit_raises_the_bound():
    # All of a micro-batch must be freed before the next begins: the rest runs one after the other on each rank.
    shape = PipelineShape(4, 3, 1)
    costs = OpCosts.uniform(shape, weight_gradient=1.0)
    # Without a limit: 4 F and 3 BI until the first gradient is back on rank 0, which then has 3 BI and 3 BW to do.
    assert lower_bound(SchedulingProblem.of(shape, costs)) == 4 + 3 + 3 + 3
    assert lower_bound(SchedulingProblem.of(shape, costs, 1.0)) == 3 * (4 + 4 + 1)


def test_memory_as_an_area():
    # Two model chunks in a V and memory for one and a half micro-batches, with no work but the first forward.
    shape = PipelineShape(4, 8, 1, 2, Placement.V)
    costs = OpCosts(((1.0,),) * 4, ((1.0,),) * 4, ((0.0,),) * 4)
    held = 8 * (8 + 2) / 2
    assert lower_bound(SchedulingProblem.of(shape, costs, 1.0)) >= held
