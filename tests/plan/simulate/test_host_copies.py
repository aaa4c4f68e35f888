"""Simulated host copies: in time, serial in each direction, and the same in both simulators."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.schedules import breadth_first, rank_orders
from deepspeed_ext.plan.simulate import simulate, simulate_with_host_copies
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan, TimedColumns
from deepspeed_ext.plan.timeline import Timeline
from tests.strategies import costs_with_links, host_copy_settings, orders_of_pipelines

planned = orders_of_pipelines(2, 2, 3, 2).flatmap(
    lambda each: st.tuples(st.just(each), costs_with_links(each[1]), host_copy_settings(each[1]))
)


@settings(max_examples=40)
@given(planned)
def test_copies_that_are_planned_on_a_timeline_cost_it_no_time(drawn):
    (orders, shape), costs, copied = drawn
    without = simulate(orders, shape, costs)
    found = simulate_with_host_copies(orders, shape, costs, copied)
    for before, after in zip(without.spans, found.spans, strict=True):
        for (op, *times), (same, *now) in zip(before, after, strict=True):
            assert op == same and now == pytest.approx(times, rel=1e-9, abs=1e-9)


@settings(max_examples=40)
@given(planned)
def test_no_op_reads_during_a_copy_and_lanes_are_serial(drawn):
    (orders, shape), costs, copied = drawn
    timeline = simulate_with_host_copies(orders, shape, costs, copied)
    copied = copied.fitting(shape)
    for rank, spans in enumerate(timeline.spans):
        copies = [copy for copy in timeline.host_copies if shape.rank_of(copy.stage) == rank]
        for first, second in pairwise(sorted(copy.offload_start for copy in copies)):
            assert first <= second
        for lane in (
            [(copy.offload_start, copy.offload_end) for copy in copies],
            [(copy.fetch_start, copy.fetch_end) for copy in copies],
        ):
            assert all(end <= start for (_, end), (start, _) in pairwise(sorted(lane)))
        for copy in copies:
            last = copied.last_reader(copy.content, copy.stage, copy.token_slice)
            readers = [
                (op.kind, start, end)
                for op, start, end in spans
                if (op.stage, op.micro_batch) == (copy.stage, copy.micro_batch)
                and copy.token_slice <= op.token_slice <= last
                and op.kind is not OpKind.WEIGHT_GRADIENT
            ]
            assert copy.offload_start <= copy.offload_end <= copy.dropped <= copy.fetch_start <= copy.fetch_end
            assert all(end <= copy.dropped for kind, _, end in readers if kind is OpKind.FORWARD)
            assert all(
                copy.fetch_end <= start + 1e-9 * end for kind, start, end in readers if kind is not OpKind.FORWARD
            )
    assert Timeline.from_json(timeline.to_json()).host_copies == timeline.host_copies


@settings(max_examples=40)
@given(planned, st.sampled_from([0.01, 0.3, 1.0]))
def test_both_simulators_wait_alike_where_copies_are_slower_than_planned(drawn, speed):
    (orders, shape), costs, copied = drawn
    plan = HostCopyPlan.of(map(TimedColumns.of, simulate(orders, shape, costs).spans), shape, copied)
    plan = replace(plan, to_host=min(plan.to_host, 1e6) * speed, from_host=min(plan.from_host, 1e6) * speed)
    plain = simulate(orders, shape, costs, plan)
    assert plain.makespan >= simulate(orders, shape, costs).makespan * (1 - 1e-12)
    fast = CompiledOrders.of(orders, shape).simulate(costs, plan)
    assert [fast.spans(rank) for rank in range(shape.num_ranks)] == list(plain.spans)
    assert sorted(fast.host_copies) == sorted(plain.host_copies)


SHAPE = PipelineShape(4, 1, 2, num_model_chunks=2)
SETTINGS = HostCopySettings((1, 1), (0.0, 0.5, 0.5, 0.5), (1.0,) * 4)


def test_by_hand():
    # Rank 0: 0F0.0 from 0, 0F0.1, 2F0.0, 2F0.1, a pause from 4 to 7, then 2B0.1, 2B0.0, 0B0.1 from 11 to 13, 0B0.0.
    copied = replace(SETTINGS, to_host=1.0, from_host=0.5)
    costs = OpCosts.uniform(SHAPE, backward=2.0)
    timeline = simulate_with_host_copies(rank_orders(breadth_first, SHAPE), SHAPE, costs, copied)
    keys = Content.KEYS_AND_VALUES
    assert [copy for copy in timeline.host_copies if copy.stage == 0] == [
        # Both are read at 11, so one must be back by 9. It is posted as the rank has run all before the pause.
        (keys, 0, 0, 0, 1.0, 2.0, 2.0, 4.0, 6.0),
        (keys, 0, 0, 1, 2.0, 3.0, 3.0, 9.0, 11.0),
    ]
    assert timeline.makespan == 15
