from itertools import combinations, pairwise

import numpy as np
import pytest

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import gpipe, one_f_one_b, rank_orders, zero_bubble
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve.cuts import PolynomialCosts, op_costs
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.plan.solve.token_slices import solve_stages
from tests.plan.solve.cuts import all_cuts

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


def test_a_head_and_an_optimised_schedule():
    shape = PipelineShape(4, 4, 8)
    solved = solve_stages(shape, LAYERS, TOKENS, with_a_head, granularity=64, memory_limit=1.5)
    costs = op_costs(shape, solved.cut, with_a_head(np.diff(solved.partition.bounds)))
    found = optimise(shape, costs, memory_limit=1.5, lengths=solved.cut.lengths, effort=0.2)
    assert found.bubble_ratio <= 0.08


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
        return PolynomialCosts.of_layers(layers, seq_length, 0.5, head_time=1.5, embedding_time=0.3, fixed=0.01)

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


def test_too_few_layers():
    with pytest.raises(PlanError, match="3 layers on 4 stages"):
        solve_stages(PipelineShape(4, 1, 1), 3, 8, with_a_head, schedule=one_f_one_b)


def test_a_schedule_that_cannot_keep_the_memory_limit():
    # gpipe holds both micro-batches, however layers and token slices are dealt.
    with pytest.raises(
        PlanError, match=r"^memory limit 1\.5: no cut was found with which this schedule keeps it, the best holds 2"
    ):
        solve_stages(PipelineShape(2, 2, 2), 4, 16, with_a_head, schedule=gpipe, memory_limit=1.5)
