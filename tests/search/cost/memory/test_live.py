from itertools import pairwise
from math import inf

import numpy as np
import pytest

from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES
from deepspeed_ext.plan.timeline import Span, Timeline
from megatron_terapipe.search.price.activations import (
    SCORE_LIMIT,
    LogitLimits,
    StageBytes,
    peak_held,
    rank_order,
    steady_micro_batches,
)

CASES = [
    ("1f1b", 4, 1, 1, (8,)),
    ("1f1b", 4, 3, 1, (4, 3, 1)),
    ("gpipe", 3, 2, 1, (5, 3)),
    ("zero-bubble", 4, 2, 1, (5, 3)),
    ("interleaved", 2, 1, 3, (8,)),
    ("interleaved", 4, 2, 2, (2, 6)),
    ("breadth-first", 2, 2, 2, (2, 6)),
]


def stage_bytes(stages: int, freed: float = 0.0) -> StageBytes:
    own = np.arange(1.0, stages + 1)
    logits = np.zeros(stages)
    logits[-1] = 7.0
    return StageBytes(10 * own, own, 2 * own, logits, np.zeros(stages), 10 * own * freed)


@pytest.mark.parametrize(("schedule", "ranks", "token_slices", "model_chunks", "lengths"), CASES)
def test_the_plans_own_account(
    schedule: str, ranks: int, token_slices: int, model_chunks: int, lengths: tuple[int, ...]
) -> None:
    """`plan.memory` counts the same over a timeline in which every op takes one second."""
    shape = PipelineShape(ranks * model_chunks, 6, token_slices, model_chunks)
    freed = 0.4 if schedule == "zero-bubble" else 0.0
    bytes_of = stage_bytes(shape.num_stages, freed)
    bytes_of = bytes_of._replace(limits=LogitLimits(20.0, inf))
    by_stage = (tuple(each) for each in (bytes_of.activations, bytes_of.key_values, bytes_of.key_value_gradients))
    token_bytes = TokenBytes(*by_stage, 7.0, freed, logits_limit=20.0)
    orders = [list(SCHEDULES[schedule](shape, rank)) for rank in range(ranks)]
    spans = tuple(tuple(Span(op, index, index + 1) for index, op in enumerate(order)) for order in orders)
    curves = memory_over_time(Timeline(shape, spans), lengths, token_bytes)
    for rank, curve in enumerate(curves):
        found = peak_held(rank_order(schedule, shape, rank), lengths, bytes_of)
        assert sum(found) == pytest.approx(peak(curve))


def test_what_a_bi_leaves_may_be_more() -> None:
    """Two micro-batches on one rank, F BI BW each: 1 is kept by a forward, and 3 between BI and BW."""
    ones = StageBytes(np.ones(1), *[np.zeros(1)] * 4, -2 * np.ones(1))
    held = peak_held(rank_order("zero-bubble", PipelineShape(1, 2), 0), (1,), ones)
    assert held.activations == 3


@pytest.mark.parametrize(("schedule", "ranks", "token_slices", "model_chunks", "lengths"), CASES)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 9, 26, 31])
def test_more_micro_batches_repeat_the_peak(
    schedule: str, ranks: int, token_slices: int, model_chunks: int, lengths: tuple[int, ...], num_micro_batches: int
) -> None:
    enough = steady_micro_batches(schedule, ranks, token_slices, num_micro_batches)
    peaks = []
    for number in (enough, num_micro_batches):
        shape = PipelineShape(ranks * model_chunks, number, token_slices, model_chunks)
        held = [rank_order(schedule, shape, rank) for rank in range(ranks)]
        peaks.append([sum(peak_held(order, lengths, stage_bytes(ranks * model_chunks))) for order in held])
    assert peaks[0] == pytest.approx(peaks[1])
    assert schedule == "gpipe" or enough <= max(num_micro_batches, 1)


def test_1f1b_in_closed_form() -> None:
    """min(P - i - 1 + S, M S) token slices on stage i (arXiv 2406.03488 section 3.2)."""
    ranks, token_slices = 6, 4
    shape = PipelineShape(ranks, 8, token_slices)
    ones = StageBytes(np.ones(ranks), *[np.zeros(ranks)] * 5)
    held = [peak_held(rank_order("1f1b", shape, rank), (1,) * token_slices, ones).activations for rank in range(ranks)]
    assert held == [ranks - rank - 1 + token_slices for rank in range(ranks)]
    assert all(first > second for first, second in pairwise(held))


def test_gradients_in_the_reach_of_windows_are_there_while_backwards_run() -> None:
    """Bytes whatever the length, where a sequence has several token slices; F0 F1 B1 B0 of one micro-batch."""
    nothing = StageBytes(*[np.zeros(1)] * 6, window_gradients=5.0 * np.ones(1))
    for lengths, expected in (((6, 2), 5.0), ((8,), 0.0)):
        shape = PipelineShape(1, 1, len(lengths))
        assert peak_held(rank_order("1f1b", shape, 0), lengths, nothing).key_values == expected


def test_scores_have_a_limit() -> None:
    nothing = StageBytes(*[np.zeros(1)] * 4, 3.0 * np.ones(1), np.zeros(1), scores=SCORE_LIMIT / 4 * np.ones(1))
    for length, expected in ((2, SCORE_LIMIT / 2 + 6), (8, SCORE_LIMIT + 24)):
        assert peak_held(rank_order("1f1b", PipelineShape(1, 1), 0), (length,), nothing).working == expected
