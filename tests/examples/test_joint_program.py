"""TeraPipe's dynamic program against every batch, and every cut, that there can be."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import gpipe, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve.cuts import CutGrid, PolynomialCosts, op_costs
from examples.terapipe.joint_program import TerapipeProblem
from tests.plan.solve.cuts import all_cuts

SEQ_LENGTH = 6


def problem_of(costs_of_size, grid, batch_size, num_stages, sizes=(1,)):
    costs = {size: costs_of_size(size) for size in sizes}
    return TerapipeProblem.of(costs, grid, batch_size, num_stages, num_stages - 1)


def anything(seed, size=1, seq_length=SEQ_LENGTH):
    """Times without any order in them, for micro-batches of a size."""
    table = np.random.default_rng([seed, size]).uniform(0.5, 2, (3, seq_length + 1, seq_length + 1)) * size**0.7

    def times(stages, starts, ends):
        return np.repeat(table[:, None, starts, ends], len(stages), axis=1)

    return times


def time_of(micro_batches, costs_of_size, num_stages):
    forwards, backwards = [], []
    for size, cut in micro_batches:
        ends = np.cumsum(cut.lengths)
        forward, *parts = costs_of_size(size)([0], ends - cut.lengths, ends)[:, 0]
        forwards.extend(forward)
        backwards.extend(sum(parts))
    return sum(sum(times) + (num_stages - 1) * max(times) for times in (forwards, backwards))


def all_sizes(batch_size, sizes):
    for number in range(1, batch_size + 1):
        for chosen in combinations_with_replacement(sizes, number):
            if sum(chosen) == batch_size:
                yield chosen


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.none() | st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.floats(0, 1),
    st.floats(0, 0.3),
)
@settings(max_examples=25, deadline=None)
def test_no_cut_is_better_under_gpipe(
    num_stages, num_micro_batches, count, granularity, min_length, attention_share, fixed
):
    costs = PolynomialCosts.of_layers([1] * num_stages, 11, attention_share, fixed=fixed)
    candidates = list(all_cuts(11, [count] if count else range(1, 12), granularity, min_length))
    if not candidates:
        return
    problem = problem_of(lambda size: costs, CutGrid(11, granularity, min_length), num_micro_batches, num_stages)
    solved = problem.solve(count, tolerance=0.0)
    cut = solved.micro_batches[0][1]
    assert cut in candidates and solved.micro_batches == ((1, cut),) * num_micro_batches
    shape = PipelineShape(num_stages, num_micro_batches, len(cut))
    simulated = simulate(rank_orders(gpipe, shape), shape, op_costs(shape, cut, costs))
    assert solved.makespan == pytest.approx(simulated.makespan)
    best = min(time_of([(1, cut)] * num_micro_batches, lambda size: costs, num_stages) for cut in candidates)
    assert solved.makespan == pytest.approx(best)
    assert solved.lower_bound == pytest.approx(best)


@pytest.mark.parametrize("equal_sizes", [False, True])
@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_batch_is_better(seed, count, equal_sizes):
    batch_size, num_stages, sizes = 3, 5, (1, 2, 3)
    cuts = list(all_cuts(SEQ_LENGTH, [count] if count else range(1, SEQ_LENGTH + 1), 2))

    def costs(size):
        return anything(seed, size)

    # Of each size only one cut is worth having once the limits are fixed; the oracle tries a cut for each all the same.
    candidates = [
        list(zip(chosen, each, strict=True))
        for chosen in all_sizes(batch_size, sizes)
        if not equal_sizes or len(set(chosen)) == 1
        for each in product(cuts, repeat=len(chosen))
    ]
    problem = problem_of(costs, CutGrid(SEQ_LENGTH, 2), batch_size, num_stages, sizes)
    solved = problem.solve(count, equal_sizes=equal_sizes, tolerance=0.0)
    best = min(time_of(candidate, costs, num_stages) for candidate in candidates)
    assert solved.makespan == pytest.approx(best)
    assert solved.lower_bound == pytest.approx(best)
    assert time_of(solved.micro_batches, costs, num_stages) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_forward_and_backward_may_be_longest_in_different_token_slices(seed):
    # No order at all in the times: the two limits are far apart, and many pairs of them must be looked at.
    times = anything(seed, seq_length=16)
    solved = problem_of(lambda size: times, CutGrid(16), 1, 12).solve(4, tolerance=0.0)
    best = min(time_of([(1, cut)], lambda size: times, 12) for cut in all_cuts(16, [4]))
    assert solved.makespan == pytest.approx(best)
    assert solved.lower_bound == pytest.approx(best)


@pytest.mark.parametrize(("seq_length", "num_stages", "sizes"), [(4096, 8, (1,)), (256, 12, (1, 2, 4))])
def test_with_a_tolerance_it_is_that_near(seq_length, num_stages, sizes):
    def costs(size):
        return PolynomialCosts.of_layers([1] * num_stages, seq_length, 0.5, layer_time=size, fixed=0.01)

    problem = problem_of(costs, CutGrid(seq_length, seq_length // 64), sizes[-1], num_stages, sizes)
    exact, near = (problem.solve(tolerance=tolerance) for tolerance in (0.0, 0.03))
    assert exact.makespan <= near.makespan <= exact.makespan * 1.0310
    assert near.lower_bound <= exact.makespan * (1 + 1e-9)


def test_times_of_zero_are_solved():
    free = PolynomialCosts(np.zeros((3, 2, 3)))
    assert problem_of(lambda size: free, CutGrid(32, 8), 2, 2, (1, 2)).solve().makespan == 0
    for message, grid in (
        ("of 2 sequences do not fill a batch of 3", CutGrid(6)),
        ("leaves 8192 places", CutGrid(8192)),
    ):
        with pytest.raises(PlanError, match=message):
            problem_of(lambda size: free, grid, 3, 2, (2,)).solve()
