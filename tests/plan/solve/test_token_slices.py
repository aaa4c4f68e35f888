import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import SCHEDULES, fixed, interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, PolynomialCosts, op_costs
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.solve.token_slices import solve_token_slices
from tests.plan.solve.cuts import all_cuts


def simulated(schedule, shape, cut, token_slice_costs, transfer=0.0):
    return simulate(rank_orders(schedule, shape), shape, op_costs(shape, cut, token_slice_costs, transfer))


CASES = [
    # schedule, stages, micro-batches, token slices, model chunks, attention share, fixed cost, layers, transfer
    (one_f_one_b, 4, 1, 4, 1, 0.6, 0.0, None, 0.0),
    (one_f_one_b, 4, 3, 3, 1, 0.3, 0.02, [2, 2, 2, 1], 0.1),
    (zero_bubble, 4, 2, 4, 1, 0.6, 0.01, None, 0.0),
    (zero_bubble, 3, 2, 4, 1, 0.8, 0.0, [1, 3, 2], TransferCosts((0.01,) * 2, (100.0,) * 2, (8.0,) * 4)),
    (interleaved, 6, 2, 3, 2, 0.6, 0.0, None, 0.0),
]


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches", "count", "num_model_chunks", "share", "each", "layers", "transfer"),
    CASES,
)
def test_within_a_per_cent_of_the_best_of_all_cuts(
    schedule, num_stages, num_micro_batches, count, num_model_chunks, share, each, layers, transfer
):
    shape = PipelineShape(num_stages, num_micro_batches, count, num_model_chunks)
    token_slice_costs = PolynomialCosts.of_layers(layers or [1] * num_stages, 24, share, fixed=each)
    solved = solve_token_slices(shape, 24, token_slice_costs, schedule=schedule, transfer=transfer)
    best = min(
        simulated(schedule, shape, cut, token_slice_costs, transfer).makespan
        for cut in all_cuts(24, [count], min_length=1)
    )
    assert solved.makespan <= 1.01 * best
    assert solved.makespan == pytest.approx(
        simulated(schedule, shape, solved.cut, token_slice_costs, transfer).makespan, rel=1e-12
    )


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 9), st.integers(9, 120), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_cuts_keep_granularity_and_minimum(count, granularity, min_length, seq_length, attention):
    grid = CutGrid(seq_length, granularity, min_length)
    try:
        grid.check_count(count)
    except PlanError:
        assert not list(all_cuts(seq_length, [count], granularity, min_length))
        return
    cut = grid.balanced(count, attention)
    solved = solve_token_slices(
        PipelineShape(2, 1, count),
        seq_length,
        PolynomialCosts.of_layers([1, 1], seq_length, attention),
        schedule=one_f_one_b,
        granularity=granularity,
        min_length=min_length,
        effort=1e-3,
    ).cut
    for each in (cut, solved):
        assert each.seq_length == seq_length and len(each) == count
        assert min(each.lengths) >= min_length
        assert all(length % granularity == 0 for length in each.lengths[:-1])


def test_better_than_equal_forwards_where_backwards_weigh_differently():
    shape = PipelineShape(8, 8, 8)
    token_slice_costs = PolynomialCosts.of_layers([1] * 8, 8192, 0.6)
    flops = TokenSlices.balanced(8192, 8, linear_cost=0.4, attention_cost=2 * 0.6 / 8192, granularity=64)
    solved = solve_token_slices(shape, 8192, token_slice_costs, schedule=zero_bubble, granularity=64, effort=0.3)
    assert solved.makespan < simulated(zero_bubble, shape, flops, token_slice_costs).makespan


def test_a_memory_limit_of_a_fixed_schedule():
    shape = PipelineShape(8, 8, 8)
    token_slice_costs = PolynomialCosts.of_layers([1] * 8, 8192, 0.6)
    options = {"schedule": one_f_one_b, "granularity": 64, "effort": 0.3}
    free = solve_token_slices(shape, 8192, token_slice_costs, **options)
    limited = solve_token_slices(shape, 8192, token_slice_costs, memory_limit=2.0, **options)

    def peak(solved):
        return max(peak_activation(simulated(one_f_one_b, shape, solved.cut, token_slice_costs), solved.cut.lengths))

    assert peak(limited) <= 2.0 < peak(free)
    assert free.makespan < limited.makespan
    with pytest.raises(PlanError, match=r"memory limit 1\.2: no cut was found with which this schedule keeps it"):
        solve_token_slices(shape, 8192, token_slice_costs, memory_limit=1.2, **options)


def test_for_an_optimised_schedule_within_a_per_cent_of_the_best_of_all_cuts():
    shape = PipelineShape(4, 2, 3, 2, Placement.V)
    token_slice_costs = PolynomialCosts.of_layers([1] * 4, 12, 0.6, fixed=0.01)

    def makespan(cut):
        costs = op_costs(shape, cut, token_slice_costs)
        return optimise(shape, costs, memory_limit=1.5, lengths=cut.lengths, effort=0.003).makespan

    solved = solve_token_slices(shape, 12, token_slice_costs, memory_limit=1.5, effort=0.2)
    assert makespan(solved.cut) <= 1.01 * min(map(makespan, all_cuts(12, [3])))


def test_costs_may_be_any_function():
    def steps(stages, starts, ends):
        """A kernel that works in tiles of 8 tokens."""
        tiles = -((starts - ends) // 8)
        return np.ones((3, len(stages), *starts.shape)) * tiles

    solved = solve_token_slices(PipelineShape(3, 1, 4), 32, steps, schedule=one_f_one_b)
    assert solved.cut.lengths == (8, 8, 8, 8)


def test_the_same_arguments_give_the_same_cut():
    shape = PipelineShape(4, 2, 4, 2)
    token_slice_costs = PolynomialCosts.of_layers([1] * 4, 64, 0.5)
    first, again = (solve_token_slices(shape, 64, token_slice_costs, effort=0.05) for _ in range(2))
    assert first == again


def test_a_schedule_that_deadlocks_is_refused():
    shape = PipelineShape(2, 2, 1)
    first, second = rank_orders(SCHEDULES["gpipe"], shape)
    with pytest.raises(PlanError, match="deadlocks, whatever the token slices"):
        solve_token_slices(shape, 8, PolynomialCosts.of_layers([1, 1], 8, 0.5), schedule=fixed([first, second[::-1]]))
