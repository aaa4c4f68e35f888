"""TeraPipe's joint program against every batch there can be."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import gpipe, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve.token_slice_costs import PolynomialCosts, op_costs
from megatron_terapipe.search.rank.joint_token_slices import solve_joint
from tests.plan.solve.cuts import all_cuts

SEQ_LENGTH = 6


def anything(seed, size):
    """Times without any order in them, for micro-batches of a size."""
    table = np.random.default_rng([seed, size]).uniform(0.5, 2, (3, SEQ_LENGTH + 1, SEQ_LENGTH + 1)) * size**0.7

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
    solved = solve_joint(
        costs,
        SEQ_LENGTH,
        batch_size,
        num_stages=num_stages,
        sizes=sizes,
        equal_sizes=equal_sizes,
        num_token_slices=count,
        granularity=2,
        tolerance=0.0,
    )
    best = min(time_of(candidate, costs, num_stages) for candidate in candidates)
    assert solved.time_s == pytest.approx(best)
    assert solved.lower_bound_s == pytest.approx(best)
    assert time_of(solved.micro_batches, costs, num_stages) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_forward_and_backward_may_be_longest_in_different_token_slices(seed):
    # No order at all in the times: the two limits are far apart, and many pairs of them must be looked at.
    table = np.random.default_rng(seed).uniform(0.5, 2, (3, 17, 17))

    def times(stages, starts, ends):
        return np.repeat(table[:, None, starts, ends], len(stages), axis=1)

    solved = solve_joint(lambda size: times, 16, 1, num_stages=12, num_token_slices=4, granularity=1, tolerance=0.0)
    best = min(time_of([(1, cut)], lambda size: times, 12) for cut in all_cuts(16, [4]))
    assert solved.time_s == pytest.approx(best)
    assert solved.lower_bound_s == pytest.approx(best)


def test_sizes_need_not_divide_the_batch():
    # Micro-batches of two cost hardly more than those of one, so five sequences go as 2 + 2 + 1.
    def costs(size):
        return PolynomialCosts.of_layers([1], SEQ_LENGTH, 0.1, layer_time=1 + 0.01 * size, fixed=5.0)

    solved = solve_joint(costs, SEQ_LENGTH, 5, num_stages=1, sizes=(1, 2), granularity=1, tolerance=0.0)
    assert [size for size, _ in solved.micro_batches] == [2, 2, 1]


def test_the_formula_is_what_gpipe_takes_with_one_size():
    def costs(size):
        return PolynomialCosts.of_layers([1] * 4, 64, 0.3, layer_time=size, fixed=0.02)

    solved = solve_joint(costs, 64, 4, num_stages=4, equal_sizes=True)
    sizes, cuts = zip(*solved.micro_batches, strict=True)
    assert len(set(sizes)) == 1
    shape = PipelineShape(4, len(sizes), len(cuts[0]))
    played = simulate(rank_orders(gpipe, shape), shape, op_costs(shape, cuts[0], costs(sizes[0])))
    assert solved.time_s == pytest.approx(played.makespan)


def test_with_a_tolerance_it_is_that_near():
    exact, near = (
        solve_joint(
            lambda size: PolynomialCosts.of_layers([1] * 12, 256, 0.3, layer_time=size, fixed=0.01),
            256,
            4,
            num_stages=12,
            tolerance=tolerance,
        )
        for tolerance in (0.0, 0.05)
    )
    assert exact.time_s <= near.time_s <= exact.time_s * 1.05
    assert near.lower_bound_s <= exact.time_s * (1 + 1e-9)


def test_times_of_nothing_end():
    free = PolynomialCosts(np.zeros((3, 2, 3)))
    assert solve_joint(lambda size: free, 32, 2, num_stages=2).time_s == 0


def test_sizes_that_cannot_fill_the_batch():
    with pytest.raises(PlanError, match="micro-batches of 2 sequences do not fill a batch of 3"):
        solve_joint(lambda size: anything(0, size), SEQ_LENGTH, 3, num_stages=2, sizes=(2,), granularity=1)


def test_too_many_places_to_cut_at():
    with pytest.raises(PlanError, match="give 8 or more"):
        solve_joint(lambda size: anything(0, size), 8192, 1, num_stages=2, granularity=1)
