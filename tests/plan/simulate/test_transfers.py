"""Transfers: their costs, their order on a channel, and their overlap with compute."""

import json
from collections import defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.ops import PipelineShape, received, result
from deepspeed_ext.plan.programs.program import channel_of
from deepspeed_ext.plan.schedules import forward_order, interleaved, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline
from tests.strategies import costs_with_links, orders_of_pipelines

SHAPE = PipelineShape(num_stages=3, num_micro_batches=1, num_token_slices=2)
TABLE = [[1, 1]] * 3
GOOD = {"latency": 0.5, "bandwidth": 4, "bytes": [8, 2]}


def read(transfer) -> OpCosts:
    return OpCosts.from_json(json.dumps({"forward": TABLE, "backward": TABLE, "transfer": transfer}), SHAPE)


def forwards(shape: PipelineShape, costs: OpCosts) -> Timeline:
    return simulate([list(forward_order(shape, rank)) for rank in range(shape.num_ranks)], shape, costs)


def test_latency_bandwidth_and_bytes():
    costs = read(0.25)
    assert (costs.transfer, costs.latency(1), costs.sending_time(1, 0)) == (0.25, 0.25, 0.0)
    costs = read({**GOOD, "latency": [0.5, 0.1], "bandwidth": [4, 8]})
    assert [(costs.latency(boundary), costs.sending_time(boundary, 0)) for boundary in (0, 1)] == [(0.5, 2), (0.1, 1)]
    costs = read(GOOD)
    assert costs.transfer == TransferCosts((0.5, 0.5), (4.0, 4.0), (8.0, 2.0))
    assert (costs.latency(0), costs.sending_time(0, 0), costs.sending_time(1, 1)) == (0.5, 2.0, 0.5)


def test_messages_of_a_channel_go_one_after_the_other_by_hand():
    # Both token slices are ready by 2, and the first is 3 on the wire: the second leaves at 4, not at 2.
    shape = PipelineShape(2, 1, 2)
    links = TransferCosts(latency=(0.5,), bandwidth=(2.0,), message_bytes=(6.0, 2.0))
    timeline = forwards(shape, OpCosts.uniform(shape, transfer=links))
    assert [(str(one.op), one.start, one.end, one.sent) for one in timeline.transfers] == [
        ("0F0.0", 1.0, 4.5, 4.0),
        ("0F0.1", 4.0, 5.5, 5.0),
    ]
    assert [(span.start, span.end) for span in timeline.spans[1]] == [(4.5, 5.5), (5.5, 6.5)]


def test_an_empty_message_after_a_full_one_is_recorded():
    shape = PipelineShape(2, 1, 2)
    links = TransferCosts(latency=(0.0,), bandwidth=(1.0,), message_bytes=(3.0, 0.0))
    timeline = forwards(shape, OpCosts.uniform(shape, transfer=links))
    assert [(one.start, one.end) for one in timeline.transfers] == [(1.0, 4.0), (4.0, 4.0)]


def test_latency_keeps_no_channel_busy():
    shape = PipelineShape(2, 1, 4)
    timeline = forwards(shape, OpCosts.uniform(shape, transfer=10.0))
    assert [span.start for span in timeline.spans[1]] == [11.0, 12.0, 13.0, 14.0]


def test_model_chunks_share_the_channel_between_two_ranks():
    # Stages 0 -> 1 and 2 -> 3 are on one channel, 1 -> 2 comes round on another.
    shape = PipelineShape(4, 2, 1, num_model_chunks=2)
    links = TransferCosts((0.0,) * 3, (1.0,) * 3, (5.0,))
    timeline = simulate(rank_orders(interleaved, shape), shape, OpCosts.uniform(shape, transfer=links))
    there = [transfer for transfer in timeline.transfers if transfer.channel.source == 0 and transfer.op.kind == "F"]
    assert [str(transfer.op) for transfer in there] == ["0F0.0", "0F1.0", "2F0.0", "2F1.0"]
    assert all(later.start >= before.sent for before, later in pairwise(there))


@given(orders_of_pipelines(), st.data())
def test_transfers_take_turns(orders_and_shape, data):
    orders, shape = orders_and_shape
    costs = data.draw(costs_with_links(shape))
    timeline = simulate(orders, shape, costs)
    ends = {result(span.op): span.end for rank in timeline.spans for span in rank}
    on_channel = defaultdict(list)
    for transfer in timeline.transfers:
        on_channel[transfer.channel].append(transfer)
        assert ends[transfer.op] <= transfer.start <= transfer.sent <= transfer.end
    for transfers in on_channel.values():
        assert all(before.sent <= later.start for before, later in pairwise(transfers))
    if costs.transfer and not isinstance(costs.transfer, TransferCosts):
        ways = [channel_of(op, shape) for order in orders for op in order if received(op, shape) is not None]
        assert len(timeline.transfers) == sum(way.source != way.target for way in ways)
