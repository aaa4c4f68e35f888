"""Costs of ops, from files and from the share of attention; tiles of attention that is written out."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import SHORTEST_IN_WINDOW, OpCosts, attention_costs, tile_length
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import schedule_named

SHAPE = PipelineShape(num_stages=2, num_micro_batches=3, num_token_slices=2)
TABLE = [[1, 2], [3, 4.5]]


def read(**fields) -> OpCosts:
    return OpCosts.from_json(json.dumps({"forward": TABLE, "backward": TABLE, **fields}), SHAPE)


def test_times_of_ops():
    costs = read(backward=[[10, 20], [30, 40]], weight_gradient=[[0.5, 0], [0, 1]], transfer=0.25)
    times = {"1F0.1": 4.5, "1F2.1": 4.5, "0BI0.0": 10, "0BW0.0": 0.5, "0B0.0": 10.5, "1B0.1": 41}
    assert {text: costs.duration(Op.parse(text)) for text in times} == times and costs.transfer == 0.25
    # Without weight gradients of their own, backwards are whole.
    assert read().duration(Op.parse("1B0.0")) == read().duration(Op.parse("1BI0.0")) == 3.0
    for kind in OpKind:
        for stage, token_slice in product(range(2), range(2)):
            assert costs.durations(kind)[stage][token_slice] == costs.duration(Op(kind, stage, 0, token_slice))


def test_with_model_chunks_rows_are_for_stages_or_for_ranks():
    shape = PipelineShape(4, 1, 2, num_model_chunks=2, placement=Placement.V)
    by_rank = json.dumps({"forward": [[1, 2], [3, 4]], "backward": [[2, 4], [6, 8]]})
    assert OpCosts.from_json(by_rank, shape).forward == ((0.5, 1.0), (1.5, 2.0), (1.5, 2.0), (0.5, 1.0))
    rows = [[1, 2], [3, 4], [5, 6], [7, 8]]
    by_stage = OpCosts.from_json(json.dumps({"forward": rows, "backward": rows}), shape)
    assert by_stage.forward == tuple(map(tuple, rows))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("zeros", [("forward",), ("backward",), ("forward", "backward")])
def test_programs_are_lowered_from_ops_that_take_no_time(schedule, zeros):
    for table in ([[1, 2], [0, 4]], [[0, 0], [3, 4]], [[0, 0], [0, 0]]):
        costs = read(**{name: table for name in zeros}, weight_gradient=[[0, 0], [0, 0]])
        programs = lower(schedule_named(schedule), SHAPE, costs=costs)
        assert len(programs) == SHAPE.num_ranks


def test_costs_in_order_change_only_ops_that_take_no_time():
    costs = read(forward=[[1, 0], [3, 4]])
    (first, second), rest = costs.in_order().forward
    assert (first, rest) == (1, (3, 4)) and 0 < second < 1e-8
    assert costs.in_order().backward == costs.backward
    assert read().in_order() == read()


def test_in_a_window_the_share_of_attention_is_that_of_the_scores():
    """The sum over tokens is the definition; the formula is its limit for many tokens."""
    cut, window, tokens = (50, 30, 20), 25, range(100)
    scores = [min(token + 0.5, window) for token in tokens]
    costs = attention_costs(PipelineShape(2, 1, 3), cut, 1.0, window=window)
    bounds = [(0, 50), (50, 80), (80, 100)]
    expected = [sum(scores[start:end]) / sum(scores) for start, end in bounds]
    assert costs.forward[0] == pytest.approx(expected, rel=1e-3)
    assert sum(attention_costs(PipelineShape(2, 1, 3), cut, 0.4, window=window).forward[1]) == pytest.approx(1.0)


@pytest.mark.parametrize("window", [100, 1000])
def test_a_window_of_the_whole_sequence_changes_no_cost(window):
    shape, cut = PipelineShape(2, 1, 3), (50, 30, 20)
    assert attention_costs(shape, cut, 0.6, window=window) == attention_costs(shape, cut, 0.6)


sizes = st.integers(1, 5000)


@given(num_queries=sizes, prefix_len=st.integers(0, 5000), heads=st.integers(1, 64), window=st.none() | sizes)
def test_tiles_have_no_more_scores_than_may_exist(
    num_queries: int, prefix_len: int, heads: int, window: int | None
) -> None:
    at_once = 100_000
    length = tile_length(num_queries, prefix_len + num_queries, heads, window, at_once)
    reached = prefix_len + num_queries if window is None else min(prefix_len + num_queries, window - 1 + length)
    assert 1 <= length <= num_queries
    assert length == 1 or length * heads * reached <= at_once
    if window is not None:
        # At most half as many again are computed as windows have, but for narrow ones.
        assert length <= max(window / 2, SHORTEST_IN_WINDOW)
