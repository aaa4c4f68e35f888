import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import gpipe, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve.terapipe import solve_terapipe
from deepspeed_ext.plan.solve.token_slice_costs import PolynomialCosts, op_costs
from tests.plan.solve.cuts import all_cuts


def simulated(cut, token_slice_costs, num_stages, num_micro_batches):
    shape = PipelineShape(num_stages, num_micro_batches, len(cut))
    return simulate(rank_orders(gpipe, shape), shape, op_costs(shape, cut, token_slice_costs)).makespan


def makespan_of(cut, token_slice_costs, num_stages, num_micro_batches):
    ends = np.cumsum(cut.lengths)
    forward, *parts = token_slice_costs([0], ends - cut.lengths, ends)[:, 0]
    passes = (forward, sum(parts))
    return sum(num_micro_batches * times.sum() + (num_stages - 1) * times.max() for times in passes)


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
    seq_length = 11
    token_slice_costs = PolynomialCosts.of_layers([1] * num_stages, seq_length, attention_share, fixed=fixed)
    candidates = list(all_cuts(seq_length, [count] if count else range(1, 12), granularity, min_length))
    if not candidates:
        return
    solved = solve_terapipe(
        token_slice_costs,
        seq_length,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_token_slices=count,
        granularity=granularity,
        min_length=min_length,
        tolerance=0.0,
    )

    def formula(cut):
        return makespan_of(cut, token_slice_costs, num_stages, num_micro_batches)

    assert solved.cut in candidates
    assert solved.makespan == pytest.approx(simulated(solved.cut, token_slice_costs, num_stages, num_micro_batches))
    assert solved.makespan == pytest.approx(min(map(formula, candidates)))
    assert solved.lower_bound == pytest.approx(solved.makespan)


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better_where_times_are_anything(seed):
    # No order at all in the times: the two limits are far apart, and many pairs of them must be looked at.
    random = np.random.default_rng(seed)
    table = random.uniform(0.5, 2, (3, 17, 17))

    def times(stages, starts, ends):
        return np.repeat(table[:, None, starts, ends], len(stages), axis=1)

    solved = solve_terapipe(times, 16, num_stages=12, num_token_slices=4, tolerance=0.0)
    best = min(makespan_of(cut, times, 12, 1) for cut in all_cuts(16, [4]))
    assert solved.makespan == pytest.approx(best)
    assert solved.lower_bound == pytest.approx(best)


def test_with_a_tolerance_it_is_that_near():
    token_slice_costs = PolynomialCosts.of_layers([1] * 8, 4096, 0.6, fixed=0.01)
    exact = solve_terapipe(token_slice_costs, 4096, num_stages=8, granularity=64, tolerance=0)
    near = solve_terapipe(token_slice_costs, 4096, num_stages=8, granularity=64, tolerance=0.01)
    assert exact.makespan <= near.makespan <= exact.makespan * 1.0101
    assert near.lower_bound <= exact.makespan


def test_what_every_op_costs_besides_makes_token_slices_longer():
    def count(fixed):
        token_slice_costs = PolynomialCosts.of_layers([1] * 4, 256, 0.5, fixed=fixed)
        return len(solve_terapipe(token_slice_costs, 256, num_stages=4).cut)

    assert count(0.0) > count(0.01) > count(5.0) == 1


@pytest.mark.parametrize(
    ("seq_length", "options", "message"),
    [
        (100000, {}, "granularity 1 leaves 100000 places to cut 100000 tokens at: give 25 or more"),
        (100, {"num_token_slices": 5, "min_length": 30}, "5 token slices of 100 tokens, each of at least 30"),
        (100, {"granularity": 0}, "granularity=0 is not a positive whole number"),
    ],
)
def test_what_cannot_be_cut(seq_length, options, message):
    with pytest.raises(PlanError, match=message):
        solve_terapipe(PolynomialCosts.of_layers([1], 100, 0.5), seq_length, num_stages=2, **options)
