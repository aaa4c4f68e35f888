"""Properties of every schedule for any shape and costs. Closed forms are in a file of their own."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.ops import Op, OpKind, parts, prerequisites, result
from deepspeed_ext.plan.schedules import forward_order, interleaved, one_f_one_b, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.timeline import executed_order
from tests.strategies import WITH_MODEL_CHUNKS, costs_with_links, orders_of_pipelines, pipelines, shapes, tables, times


@given(pipelines())
def test_every_rank_computes_each_part_of_its_stages_once(pipeline):
    name, shape = pipeline
    orders = rank_orders(schedule_named(name), shape)
    check_complete(orders, shape)
    for rank, order in enumerate(orders):
        expected = {
            Op(kind, stage, micro_batch, token_slice)
            for kind in (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
            for stage in range(shape.num_stages)
            if shape.rank_of(stage) == rank
            for micro_batch in range(shape.num_micro_batches)
            for token_slice in range(shape.num_token_slices)
        }
        computed = [part for op in order for part in parts(op)]
        assert len(computed) == len(expected) and set(computed) == expected


@given(pipelines())
def test_micro_batches_go_first_to_last_on_every_stage(pipeline):
    # ADR 0005: gradients of weights then add up in the same order, whatever the schedule.
    name, shape = pipeline
    backwards = [
        (micro_batch, token_slice)
        for micro_batch in range(shape.num_micro_batches)
        for token_slice in reversed(range(shape.num_token_slices))
    ]
    for rank, order in enumerate(rank_orders(schedule_named(name), shape)):
        for stage in shape.stages_of(rank):
            for part in (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT):
                sums = [op[2:] for op in order for each in parts(op) if each.kind is part and op.stage == stage]
                assert sums == backwards


@given(orders_of_pipelines(), st.data())
def test_no_op_starts_before_its_inputs_have_arrived(orders_and_shape, data):
    orders, shape = orders_and_shape
    costs = data.draw(costs_with_links(shape))
    timeline = simulate(orders, shape, costs)
    assert executed_order(timeline) == orders
    spans = {result(span.op): span for rank in timeline.spans for span in rank}
    arrivals = {transfer.op: transfer.end for transfer in timeline.transfers}
    for rank in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(rank))
    for op, start, end in spans.values():
        assert end == start + costs.duration(op)
        for needed in prerequisites(op, shape):
            there = spans[needed].end
            if shape.rank_of(needed.stage) != shape.rank_of(op.stage):
                boundary = min(needed.stage, op.stage)
                travel = costs.sending_time(boundary, op.token_slice) + costs.latency(boundary)
                assert arrivals.get(needed, there) >= there + travel * (1 - 1e-9)
                there = arrivals.get(needed, there)
            assert there <= start


@given(orders_of_pipelines(3, 3, 3), st.data())
def test_slower_ops_and_longer_transfers_never_shorten_the_makespan(orders_and_shape, data):
    orders, shape = orders_and_shape
    costs = data.draw(costs_with_links(shape))
    makespan = simulate(orders, shape, costs).makespan
    more = data.draw(tables(shape))

    def slower(table):
        return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(table, more, strict=True))

    for name in ("forward", "backward", "weight_gradient"):
        assert simulate(orders, shape, replace(costs, **{name: slower(getattr(costs, name))})).makespan >= makespan
    if isinstance(costs.transfer, float):
        assert simulate(orders, shape, replace(costs, transfer=costs.transfer + data.draw(times))).makespan >= makespan
        return
    later = data.draw(times)
    latency = tuple(each + later for each in costs.transfer.latency)
    message_bytes = tuple(each + later for each in costs.transfer.message_bytes)
    for links in (replace(costs.transfer, latency=latency), replace(costs.transfer, message_bytes=message_bytes)):
        assert simulate(orders, shape, replace(costs, transfer=links)).makespan >= makespan


@given(shapes(max_model_chunks=3))
def test_evaluation_is_the_forward_part_of_every_schedule(shape):
    for name in WITH_MODEL_CHUNKS:
        for rank in range(shape.num_ranks):
            order = [op for op in schedule_named(name)(shape, rank) if op.kind is OpKind.FORWARD]
            evaluation = list(forward_order(shape, rank))
            # Breadth-first has another order, of which evaluation would have to keep more activations at a time.
            assert order == (sorted(evaluation) if name == "breadth-first" else evaluation)


@given(shapes())
def test_interleaved_on_one_stage_a_rank_is_1f1b(shape):
    assert rank_orders(interleaved, shape) == rank_orders(one_f_one_b, shape)
