"""Token slices, their costs, and layers of stages, against all cuts that there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import TransferCosts, attention_costs
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import interleaved, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, PolynomialCosts, op_costs
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.solve.token_slices import solve_stages, solve_token_slices
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


@given(st.integers(1, 3), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 2))
@settings(deadline=None)
def test_equal_layers_have_the_costs_of_attention_costs(num_model_chunks, lengths, attention_share, head):
    shape = PipelineShape(2 * num_model_chunks, 1, len(lengths), num_model_chunks, Placement.V)
    layers = [1] * shape.num_stages
    token_slice_costs = PolynomialCosts.of_layers(
        layers, sum(lengths), attention_share, layer_time=1 / num_model_chunks, head_time=head
    )
    costs = op_costs(shape, TokenSlices(tuple(lengths)), token_slice_costs)
    expected = attention_costs(shape, lengths, attention_share, head_share=head)
    for ours, theirs in zip(costs.forward + costs.backward, expected.forward + expected.backward, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert np.allclose(costs.weight_gradient, expected.weight_gradient, rtol=0, atol=1e-12)


def test_messages_are_as_long_as_their_token_slices():
    shape = PipelineShape(2, 1, 2)
    transfer = TransferCosts((0.1,), (2.0,), (50.0, 50.0))
    costs = op_costs(shape, TokenSlices((30, 10)), PolynomialCosts.of_layers([1, 1], 40, 0.5), transfer)
    assert [costs.sending_time(0, token_slice) for token_slice in (0, 1)] == [37.5, 12.5]


TOKENS = 8192
LAYERS = 32
"""8 on each of 4 stages, so that one layer is an eighth of a stage."""


def with_a_head(layers):
    """Of half a stage: F, BI and BW of the last stage take as much as those of 4 layers without attention."""
    return PolynomialCosts.of_layers(layers, TOKENS, 0.3, layer_time=1 / 8, head_time=0.5)


def bubble(solved, shape, schedule):
    costs = op_costs(shape, solved.cut, with_a_head(np.diff(solved.partition.bounds)))
    return simulate(rank_orders(schedule, shape), shape, costs).bubble_ratio


@pytest.mark.parametrize(("schedule", "most"), [(one_f_one_b, 0.10), (zero_bubble, 0.06)])
def test_a_head_of_half_a_stage(schedule, most):
    # With even stages: 29.4 % under 1f1b.
    shape = PipelineShape(4, 4, 8)
    solved = solve_stages(shape, LAYERS, TOKENS, with_a_head, schedule=schedule, granularity=64)
    assert solved.partition.num_layers == LAYERS
    assert bubble(solved, shape, schedule) <= most


@pytest.mark.parametrize("placement", Placement)
def test_model_chunks_even_out_between_the_stages_of_a_rank(placement):
    shape = PipelineShape(4, 2, 2, 2, placement)
    solved = solve_stages(shape, 8, 16, lambda layers: PolynomialCosts.of_layers(layers, 16, 0.0, head_time=2.0))
    work = [len(solved.partition.layers(stage)) + 2 * (stage == 3) for stage in range(4)]
    by_rank = [sum(work[stage] for stage in shape.stages_of(rank)) for rank in range(2)]
    assert by_rank == [5, 5]


def test_within_a_per_cent_of_the_best_of_all_partitions_and_cuts():
    shape = PipelineShape(3, 2, 3)
    num_layers, seq_length = 7, 10

    def costs_of_layers(layers):
        return PolynomialCosts.of_layers(layers, seq_length, 0.5, head_time=1.5, fixed=0.01)

    def makespan(layers, cut):
        costs = op_costs(shape, cut, costs_of_layers(layers))
        return simulate(rank_orders(one_f_one_b, shape), shape, costs).makespan

    partitions = [
        [end - start for start, end in pairwise((0, *inner, num_layers))]
        for inner in combinations(range(1, num_layers), shape.num_stages - 1)
    ]
    best = min(makespan(layers, cut) for layers in partitions for cut in all_cuts(seq_length, [3]))
    solved = solve_stages(shape, num_layers, seq_length, costs_of_layers, schedule=one_f_one_b)
    assert solved.makespan <= 1.01 * best
    assert solved.makespan == pytest.approx(makespan(np.diff(solved.partition.bounds), solved.cut))
