"""Figures that others have computed, reproduced by our simulator.

The cost of a token slice grows with its prefix. With the sequence and a whole forward as units, and rho the share of
attention in the forward, the token slice from s to e costs

    F = (1 - rho) (e - s) + rho (e^2 - s^2)             the quadratic of Seq1F1B, arXiv 2406.03488 section 3.3
    B = (1 - rho) (e - s) + k rho (e^2 - s^2)           gradients of inputs; k = 2, or 2.5 if attention is recomputed
    W = (1 - rho) (e - s)                               gradients of weights, of which attention has none

The figures below come from a discrete-event simulation independent of ours, of Seq1F1B's order (arXiv 2406.03488)
with B and W as one op, printed in percent to the digits given here. Cuts are real numbers: no rounding to tokens.
"""

from itertools import pairwise
from math import sqrt

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.schedules import one_f_one_b, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline


def uniform_cut(num_token_slices: int) -> list[float]:
    return [index / num_token_slices for index in range(num_token_slices + 1)]


def balanced_cut(num_token_slices: int, rho: float) -> list[float]:
    """Ends at which (1 - rho) e + rho e^2 is the same share of the whole for every token slice."""
    return [
        (sqrt((1 - rho) ** 2 + 4 * rho * index / num_token_slices) - (1 - rho)) / (2 * rho)
        for index in range(num_token_slices + 1)
    ]


def simulated(shape: PipelineShape, ends: list[float], rho: float, k: float = 2.0, head: float = 0.0) -> Timeline:
    """Simulate a cut; `head` is the extra work of the last stage, as a share of a stage's linear and attention work."""
    linear = [(1 - rho) * (end - start) for start, end in pairwise(ends)]
    attention = [rho * (end**2 - start**2) for start, end in pairwise(ends)]
    forward = [one + other for one, other in zip(linear, attention, strict=True)]
    backward = [2 * one + k * other for one, other in zip(linear, attention, strict=True)]
    factors = [1.0] * shape.last_stage + [1.0 + head]
    costs = OpCosts(
        forward=tuple(tuple(factor * time for time in forward) for factor in factors),
        backward=tuple(tuple(factor * time for time in backward) for factor in factors),
    )
    return simulate(rank_orders(one_f_one_b, shape), shape, costs)


def percent(timeline: Timeline, digits: int = 1) -> float:
    return round(100 * timeline.bubble_ratio, digits)


@pytest.mark.parametrize(
    "num_stages, num_micro_batches, num_token_slices, rho, uniform, balanced",
    [
        (4, 4, 4, 0.3, 28.5, 15.8),
        (4, 4, 4, 0.6, 37.9, 15.8),
        (4, 1, 8, 0.6, 36.4, 27.3),
        (8, 8, 8, 0.3, 26.9, 9.9),
        (8, 8, 8, 0.6, 38.5, 9.9),
        (8, 8, 8, 0.8, 44.4, 9.9),
        (8, 4, 16, 0.6, 31.8, 9.9),
        (8, 16, 4, 0.6, 36.7, 9.9),
    ],
)
def test_bubble_with_attention(num_stages, num_micro_batches, num_token_slices, rho, uniform, balanced):
    shape = PipelineShape(num_stages, num_micro_batches, num_token_slices)
    assert percent(simulated(shape, uniform_cut(num_token_slices), rho)) == uniform
    assert percent(simulated(shape, balanced_cut(num_token_slices, rho), rho)) == balanced


def test_balancing_the_forward_leaves_the_backward_of_flash_attention_uneven():
    shape = PipelineShape(8, 8, 8)
    assert percent(simulated(shape, balanced_cut(8, 0.6), 0.6, k=2.0), digits=2) == 9.86
    assert percent(simulated(shape, balanced_cut(8, 0.6), 0.6, k=2.5), digits=2) == 11.55
    # Of forward and backward together, attention has the share 3.5 * 0.6 of 3 * 0.4 + 3.5 * 0.6.
    share = 3.5 * 0.6 / (3 * 0.4 + 3.5 * 0.6)
    assert percent(simulated(shape, balanced_cut(8, share), 0.6, k=2.5), digits=2) == 11.39


@pytest.mark.parametrize("head, bubble", [(0.0, 8.6), (0.25, 20.9), (0.5, 29.4), (1.0, 40.3)])
def test_bubble_when_the_last_stage_has_a_head(head, bubble):
    shape = PipelineShape(4, 4, 8)
    assert percent(simulated(shape, balanced_cut(8, 0.3), 0.3, head=head)) == bubble


@pytest.mark.parametrize("rho, peak", [(0.3, 2.02), (0.6, 2.16), (0.8, 2.25)])
def test_balanced_token_slices_keep_more_tokens_alive(rho, peak):
    # In micro-batches of activations on the first stage; 1.875 with uniform token slices.
    shape, ends = PipelineShape(8, 8, 8), balanced_cut(8, rho)
    lengths = [end - start for start, end in pairwise(ends)]
    live = most = 0.0
    for op in one_f_one_b(shape, 0):
        live += lengths[op.token_slice] if op.kind is OpKind.FORWARD else -lengths[op.token_slice]
        most = max(most, live)
    assert round(most, 2) == peak
    assert simulated(shape, uniform_cut(8), rho).peak_live_token_slices[0] / 8 == 1.875


@pytest.mark.parametrize("num_token_slices, bubble, peak", [(1, 27.3, 4.0), (2, 15.8, 2.5), (4, 8.6, 1.75)])
def test_token_slices_shrink_bubble_and_memory_at_once(num_token_slices, bubble, peak):
    # Equal costs, 4 stages, 8 micro-batches: Seq1F1B's closed forms, arXiv 2406.03488.
    shape = PipelineShape(4, 8, num_token_slices)
    timeline = simulate(rank_orders(one_f_one_b, shape), shape, OpCosts.uniform(shape))
    assert percent(timeline) == bubble
    assert timeline.peak_live_token_slices[0] / num_token_slices == peak
