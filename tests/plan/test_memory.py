from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import (
    TokenBytes,
    activation_over_time,
    host_memory_over_time,
    memory_over_time,
    peak,
    peak_activation,
)
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.schedules import one_f_one_b, rank_orders
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from tests.strategies import costs_with_links, host_copy_settings, orders_of_pipelines

ALONE = PipelineShape(num_stages=1, num_micro_batches=1, num_token_slices=2)


def timeline_of(*orders: str, shape: PipelineShape = ALONE):
    """Every op takes 1."""
    costs = OpCosts.uniform(shape, backward=1.0, weight_gradient=0.0)
    costs = OpCosts(costs.forward, costs.backward, costs.forward)
    ops = [[Op.parse(word) for word in order.split()] for order in orders]
    return simulate(ops, shape, costs)


def only(**bytes_per_token) -> TokenBytes:
    """Costs of one stage, of which all but some are 0."""
    nothing = {"activation": (0.0,), "key_value": (0.0,), "key_value_gradient": (0.0,)}
    return TokenBytes(**{**nothing, **bytes_per_token})


SPLIT = "0F0.0 0F0.1 0BI0.1 0BI0.0 0BW0.1 0BW0.0"
THREE, ORDER_OF_THREE = PipelineShape(1, 1, 3), "0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0"
CURVES = [
    # Order, shape, tokens of the token slices, bytes of a token, and the curve.
    ("0F0.0 0F0.1 0B0.1 0B0.0", ALONE, [3, 1], only(activation=(10.0,)), [(0, 30), (1, 40), (4, 30), (6, 0)]),
    # An op starts with the room that the one before it has freed.
    ("0F0.0 0B0.0 0F1.0 0B1.0", PipelineShape(1, 2), [4], only(activation=(1.0,)), [(0, 4), (6, 0)]),
    # Inputs of weight gradients stay until those are done.
    (SPLIT, ALONE, [3, 1], only(activation=(10.0,)), [(0, 30), (1, 40), (5, 30), (6, 0)]),
    (
        *(SPLIT, ALONE, [3, 1], only(activation=(10.0,), freed_by_input_gradient=0.4)),
        [(0, 30), (1, 40), (3, 36), (4, 24), (5, 18), (6, 0)],
    ),
    # Keys and values are there for the whole sequence until the last input gradient.
    (SPLIT, ALONE, [3, 1], only(key_value=(10.0,)), [(0, 40), (4, 0)]),
    # Their gradients are those of the prefix of the last token slice; each is freed by the backward of its own.
    (SPLIT, ALONE, [3, 1], only(key_value_gradient=(10.0,)), [(2, 30), (4, 0)]),
    (ORDER_OF_THREE, THREE, [3, 1, 2], only(key_value_gradient=(10.0,)), [(3, 40), (7, 30), (9, 0)]),
    ("0F0.0 0B0.0", PipelineShape(1, 1), [4], only(key_value_gradient=(10.0,)), []),
    (
        *(ORDER_OF_THREE, THREE, [3, 1, 2], only(logits=1.0, logits_limit=5.0)),
        [(0, 3), (1, 4), (2, 5), (5, 4), (7, 3), (9, 0)],
    ),
    # A state is as large whatever the length of its token slice; one token slice leaves none.
    (SPLIT, ALONE, [3, 1], only(state=(10.0,)), [(0, 10), (1, 20), (3, 10), (4, 0)]),
    (
        ORDER_OF_THREE,
        THREE,
        [3, 1, 2],
        only(state=(2.0,), stage_input=(0.0,)),
        [(0, 2), (1, 4), (2, 6), (5, 4), (7, 2), (9, 0)],
    ),
    ("0F0.0 0B0.0", PipelineShape(1, 1), [4], only(state=(10.0,)), []),
    # Evaluation has no backward that frees.
    ("0F0.0 0F0.1", ALONE, [3, 1], only(activation=(10.0,), key_value=(1.0,)), [(0, 34), (1, 44), (2, 0)]),
    # Recomputed: B takes 2, from 2 to 4; BI frees 4 of 10 a token, its logits, and the input.
    (
        *("0F0.0 0F0.1 0B0.1 0BI0.0 0BW0.0", ALONE, [3, 1]),
        only(activation=(10.0,), logits=5.0, stage_input=(1.0,), freed_by_input_gradient=0.4),
        [(0, 3), (1, 4), (2, 19), (4, 48), (5, 18), (6, 0)],
    ),
]


@pytest.mark.parametrize(("order", "shape", "lengths", "token_bytes", "expected"), CURVES)
def test_curves_by_hand(order, shape, lengths, token_bytes, expected):
    (curve,) = memory_over_time(timeline_of(order, shape=shape), lengths, token_bytes)
    steps = [point for point, before in zip(curve, [(0.0, 0.0), *curve], strict=False) if point[1] != before[1]]
    assert steps == expected


def test_logits_are_of_the_last_stage_until_the_input_gradient():
    timeline = timeline_of("0F0.0 0BI0.0 0BW0.0", "1F0.0 1BI0.0 1BW0.0", shape=PipelineShape(2, 1))
    curves = memory_over_time(timeline, [4], TokenBytes((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), logits=5.0))
    assert curves == [[(0.0, 4.0), (5.0, 0.0)], [(1.0, 24.0), (3.0, 4.0), (4.0, 0.0)]]


def test_peaks_of_uneven_token_slices_by_hand():
    shape = PipelineShape(num_stages=4, num_micro_batches=4, num_token_slices=4)
    timeline = simulate(rank_orders(one_f_one_b, shape), shape, OpCosts.uniform(shape))
    # Rank 3 is fullest with 1.0 of the first micro-batch less its last two, 0.3, and the first two of the next, 0.7.
    assert peak_activation(timeline, [40, 30, 20, 10]) == (2.1, 1.8, 1.6, 1.4)


@given(orders_of_pipelines(), st.data())
def test_the_highest_point_of_the_curve_is_the_peak(orders_and_shape, data):
    orders, shape = orders_and_shape
    lengths = data.draw(st.lists(st.integers(1, 99), min_size=shape.num_token_slices, max_size=shape.num_token_slices))
    timeline = simulate(orders, shape, OpCosts.uniform(shape, weight_gradient=1.0))
    curves = activation_over_time(timeline, lengths)
    assert [peak(curve) for curve in curves] == pytest.approx(peak_activation(timeline, lengths), rel=1e-9)


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_curves_rise_in_time_stay_above_zero_and_end_there(orders_and_shape, data):
    orders, shape = orders_and_shape
    timeline = simulate(orders, shape, data.draw(costs_with_links(shape)))
    each = (1.0,) * shape.num_stages
    token_bytes = TokenBytes(each, each, each, logits=2.0, freed_by_input_gradient=0.5)
    curves = memory_over_time(timeline, [2] * shape.num_token_slices, token_bytes)
    for curve, spans in zip(curves, timeline.spans, strict=True):
        moments = [time for time, _ in curve]
        assert moments == sorted(set(moments))
        assert all(value >= -1e-9 for _, value in curve)
        if curve:  # unless all is held for no time
            assert curve[-1][1] == 0.0
            assert spans[0].start <= curve[0][0] and curve[-1][0] <= spans[-1].end


def test_copies_on_the_host_are_not_on_the_device():
    away = TimedCopy(Content.KEYS_AND_VALUES, 0, 0, 0, 1.0, 1.5, 2.0, 3.0, 3.5)
    timeline = replace(timeline_of("0F0.0 0F0.1 0B0.1 0B0.0"), host_copies=(away,))
    sizes = only(key_value=(10.0,), key_value_gradient=(1.0,))
    (curve,) = memory_over_time(timeline, [3, 1], sizes)
    # Keys and values come and go token slice by token slice, and gradients are those of the first, during B.
    assert curve == [(0.0, 30.0), (1.0, 40.0), (2.0, 13.0), (3.0, 43.0), (4.0, 33.0), (6.0, 0.0)]
    assert host_memory_over_time(timeline, [3, 1], sizes) == [[(1.0, 30.0), (3.5, 0.0)]]


@settings(max_examples=40)
@given(
    orders_of_pipelines(2, 2, 3, 2).flatmap(
        lambda each: st.tuples(st.just(each), costs_with_links(each[1]), host_copy_settings(each[1]))
    ),
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
)
def test_curves_with_copies_equal_the_count_of_a_replay(drawn, moments):
    (orders, shape), costs, copied = drawn
    timeline = simulate_with_host_copies(orders, shape, costs, copied)
    copied = copied.fitting(shape)
    nothing = (0.0,) * shape.num_stages
    sizes = TokenBytes(nothing, copied.key_value_bytes, nothing, stage_input=copied.input_bytes)
    keys_are_apart = any(copy.content is Content.KEYS_AND_VALUES for copy in timeline.host_copies)
    on_device = memory_over_time(timeline, copied.lengths, sizes)
    on_host = host_memory_over_time(timeline, copied.lengths, sizes)
    for rank, spans in enumerate(timeline.spans):
        times = {span.op: span for span in spans}
        copies = {copy[:4]: copy for copy in timeline.host_copies}
        for moment in (timeline.start + share * timeline.makespan for share in moments):
            device = host = 0.0
            for op, start, _ in spans:
                if op.kind is not OpKind.FORWARD:
                    continue
                end = next(times[last].end for kind in TURNS if (last := Op(kind, *op[1:])) in times)
                for content in Content if keys_are_apart else (Content.INPUT,):
                    size, copy = copied.size(content, op.stage, op.token_slice), copies.get((content, *op[1:]))
                    away = copy is not None and copy.dropped <= moment < copy.fetch_start
                    device += size * (start <= moment < end and not away)
                    host += size * (copy is not None and copy.offload_start <= moment < copy.fetch_end)
            if keys_are_apart or not any(copied.key_value_bytes):
                assert value_at(on_device[rank], moment) == pytest.approx(device, abs=1e-6)
            assert value_at(on_host[rank], moment) == pytest.approx(host, abs=1e-6)


TURNS = (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)


def value_at(curve, moment):
    return next((value for time, value in reversed(curve) if time <= moment), 0.0)
