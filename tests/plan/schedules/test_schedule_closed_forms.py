"""Makespans, bubbles and peaks in closed form, to 1e-9, with one cost for all ops of a kind and transfers of none.

P ranks, M micro-batches, S token slices, V model chunks; F, B and W are the times of a whole micro-batch on a whole
rank, so that an op of one token slice on one stage takes F / (V S) and so on.
"""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak, peak_activation
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import KEEPING_ALL, gpipe, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from tests.strategies import WITH_MODEL_CHUNKS, pipelines, shapes, times

positive = st.floats(0.01, 100)


def timeline_of(name, shape, forward=1.0, backward=1.0, weight_gradient=1.0):
    """Times are those of a whole micro-batch on a whole rank."""
    finer = shape.num_model_chunks * shape.num_token_slices
    costs = OpCosts.uniform(
        shape, forward=forward / finer, backward=backward / finer, weight_gradient=weight_gradient / finer
    )
    return simulate(rank_orders(schedule_named(name), shape), shape, costs)


def fills_the_pipeline(shape):
    """Without, a micro-batch that comes back to the first rank finds it waiting."""
    return shape.num_model_chunks == 1 or shape.num_micro_batches * shape.num_token_slices >= shape.num_ranks


@given(pipelines(), positive, positive, positive)
def test_makespan_and_bubble(pipeline, forward, backward, weight_gradient):
    name, shape = pipeline
    assume(name != "zero-bubble" and fills_the_pipeline(shape))
    timeline = timeline_of(name, shape, forward, backward, weight_gradient)
    micro_batch = forward + backward + weight_gradient
    work = shape.num_micro_batches * micro_batch
    bubble = (shape.num_ranks - 1) * micro_batch / (shape.num_model_chunks * shape.num_token_slices)
    assert timeline.makespan == pytest.approx(work + bubble, rel=1e-9)
    units = shape.num_model_chunks * shape.num_micro_batches * shape.num_token_slices
    warmup = shape.num_ranks - 1
    assert timeline.bubble_ratio == pytest.approx(warmup / (units + warmup), rel=0, abs=1e-9)


@given(st.sampled_from(WITH_MODEL_CHUNKS), st.integers(2, 8), st.integers(2, 4), st.data())
def test_makespan_where_model_chunks_wait_for_the_micro_batches_to_come_round(name, ranks, model_chunks, data):
    # Too few to fill the pipeline: a pass over one model chunk takes as long as a token slice over all ranks.
    micro_batches = data.draw(st.integers(1, ranks - 1))
    token_slices = data.draw(st.integers(1, (ranks - 1) // micro_batches))
    shape = PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)
    assert not fills_the_pipeline(shape)
    one_way = model_chunks * ranks + micro_batches * token_slices - 1
    assert timeline_of(name, shape).makespan == pytest.approx(3 * one_way / (model_chunks * token_slices), rel=1e-9)


@given(shapes())
def test_makespan_of_zero_bubble_where_all_parts_cost_the_same(shape):
    units, ranks = shape.num_micro_batches * shape.num_token_slices, shape.num_ranks
    ops = 2 * units + max(units + ranks - 1, shape.num_token_slices + 2 * (ranks - 1))
    timeline = timeline_of("zero-bubble", shape)
    assert timeline.makespan == pytest.approx(ops / shape.num_token_slices, rel=1e-9)
    assert timeline.bubble_ratio == pytest.approx(1 - 3 * units / ops, rel=0, abs=1e-9)


def live(name: str, shape: PipelineShape, rank: int) -> int | None:
    """Most token slices, of all its stages, that a rank keeps; None where no closed form is known."""
    ranks, token_slices = shape.num_ranks, shape.num_token_slices
    units = shape.num_micro_batches * token_slices
    if name in KEEPING_ALL:
        return units * shape.num_model_chunks
    if name == "zero-bubble":
        return min(ranks + token_slices - 1, units)
    if shape.num_model_chunks == 1:
        return min(ranks - rank - 1 + token_slices, units)
    if ranks % token_slices or units % ranks:
        return None
    most = (shape.num_model_chunks - 1) * ranks + 2 * (ranks - rank - 1) + token_slices
    return min(most, units * shape.num_model_chunks)


@given(pipelines(max_stages=8, max_micro_batches=8, max_token_slices=8))
def test_peak_of_live_token_slices(pipeline):
    name, shape = pipeline
    peaks = [live(name, shape, rank) for rank in range(shape.num_ranks)]
    assume(None not in peaks)
    timeline = timeline_of(name, shape)
    assert list(timeline.peak_live_token_slices) == peaks
    # The same in activations of one micro-batch on one rank.
    finer = shape.num_model_chunks * shape.num_token_slices
    assert peak_activation(timeline) == pytest.approx([peak / finer for peak in peaks], rel=1e-12)


@given(shapes(), st.data())
def test_uneven_token_slices_in_gpipe_order_take_the_latency_of_terapipe(shape, data):
    # TeraPipe's latency (arXiv 2102.07988 section 3.3), both ways and for the units of all micro-batches in a row.
    row = st.lists(times, min_size=shape.num_token_slices, max_size=shape.num_token_slices).map(tuple)
    forward, backward = data.draw(row), data.draw(row)
    costs = OpCosts((forward,) * shape.num_stages, (backward,) * shape.num_stages)
    expected = sum(
        shape.num_micro_batches * sum(row) + (shape.num_stages - 1) * max(row) for row in (forward, backward)
    )
    assert simulate(rank_orders(gpipe, shape), shape, costs).makespan == pytest.approx(expected, rel=1e-9)


@given(shapes(max_model_chunks=2))
def test_token_slices_shrink_the_bubble_and_1f1b_keeps_less_alive_than_gpipe(shape):
    name = "1f1b" if shape.num_model_chunks == 1 else "interleaved"
    cut_finer = replace(shape, num_token_slices=shape.num_token_slices + 1)
    if shape.num_ranks > 1 and fills_the_pipeline(shape):
        assert timeline_of(name, cut_finer).bubble_ratio < timeline_of(name, shape).bubble_ratio
    pairs = zip(
        timeline_of(name, shape).peak_live_token_slices,
        timeline_of("gpipe", shape).peak_live_token_slices,
        strict=True,
    )
    assert all(least <= most for least, most in pairs)


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 6), st.sampled_from(["breadth-first", "interleaved"]))
def test_with_one_micro_batch_a_rank_holds_the_keys_and_values_of_one_stage_and_a_token_slice(
    ranks, model_chunks, token_slices, name
):
    shape = PipelineShape(ranks * model_chunks, 1, token_slices, model_chunks)
    each, nothing = (1.0,) * shape.num_stages, (0.0,) * shape.num_stages
    settings = HostCopySettings((1,) * token_slices, nothing, each)
    orders = rank_orders(schedule_named(name), shape)
    timeline = simulate_with_host_copies(orders, shape, OpCosts.uniform(shape, backward=2.0), settings)
    curves = memory_over_time(timeline, (1,) * token_slices, TokenBytes(nothing, each, nothing))
    assert [peak(curve) for curve in curves] == [token_slices + 1] * ranks
