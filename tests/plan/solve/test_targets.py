"""How good the optimiser must be: 8 ranks, 8 micro-batches, 8 token slices, uneven because of attention.

1f1b with balanced token slices has a bubble of 9.9 %, the zero-bubble order 9.6 % and 7.4 %.
"""

import pytest

from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.memory import peak_activation
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.solve import PolynomialCosts, op_costs, solve_token_slices
from deepspeed_ext.plan.solve.orders import optimise
from tests.plan.schedules.test_published import balanced

MEMORY = (8 + 8 - 1) / 8
"""Activations of one micro-batch that 1f1b with even token slices keeps."""
TOKENS = 8192


@pytest.mark.parametrize(
    ("attention_share", "num_model_chunks", "placement", "most"),
    [
        (0.6, 4, Placement.LOOPED, 0.02),
        (0.3, 2, Placement.V, 0.05),
    ],
)
def test_with_the_memory_of_1f1b(attention_share, num_model_chunks, placement, most):
    shape = PipelineShape(8 * num_model_chunks, 8, 8, num_model_chunks, placement)
    even = PolynomialCosts.of_layers([1] * shape.num_stages, TOKENS, attention_share, layer_time=1 / num_model_chunks)
    cut = solve_token_slices(shape, TOKENS, even, memory_limit=MEMORY, granularity=64, effort=0.1).cut
    costs = op_costs(shape, cut, even)
    assert costs.forward[0] == pytest.approx(attention_costs(shape, cut.lengths, attention_share).forward[0])
    found = optimise(shape, costs, memory_limit=MEMORY, lengths=cut.lengths, effort=0.1)
    timeline = simulate(found.orders, shape, costs)
    assert timeline.bubble_ratio <= most
    assert max(peak_activation(timeline, cut.lengths)) <= MEMORY + 1e-9
    lower(found.schedule, shape)


def test_one_stage_a_rank_under_a_memory_limit():
    # With balanced token slices 1f1b holds 2.16 micro-batches. The best order under that is within 1 % of the bound.
    shape = PipelineShape(8, 8, 8)
    lengths = balanced(8, 0.6)
    costs = attention_costs(shape, lengths, 0.6)
    found = optimise(shape, costs, memory_limit=2.163, lengths=lengths, effort=0.5)
    assert found.bubble_ratio <= 0.083
    assert found.makespan <= 1.01 * found.lower_bound


def test_without_a_memory_limit_the_bound_is_reached():
    shape = PipelineShape(8, 8, 8)
    lengths = balanced(8, 0.6)
    found = optimise(shape, attention_costs(shape, lengths, 0.6), lengths=lengths, effort=0.3)
    # The last rank waits for the first token slice, and for nothing else.
    assert found.bubble_ratio == pytest.approx(0.0352, abs=1e-3)
    assert found.makespan <= 1.001 * found.lower_bound
