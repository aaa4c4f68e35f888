"""What must hold for every schedule, whatever its shape and costs."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import prerequisites
from deepspeed_ext.plan.lowering import InstructionKind, lower
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, gpipe, one_f_one_b, schedule_named, stage_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import executed_order
from tests.strategies import costs_of, schedule_names, shapes, tables, times

PEAKS = {
    "gpipe": lambda shape, stage: shape.num_micro_batches * shape.num_token_slices,
    "1f1b": lambda shape, stage: min(
        shape.num_stages - stage - 1 + shape.num_token_slices, shape.num_micro_batches * shape.num_token_slices
    ),
}
"""Most token slices that a stage keeps alive."""

COMPUTE = {InstructionKind.FORWARD, InstructionKind.BACKWARD}
SENDS = {InstructionKind.SEND_ACTIVATION: 1, InstructionKind.SEND_GRADIENT: -1}
RECEIVES = {InstructionKind.RECEIVE_ACTIVATION: -1, InstructionKind.RECEIVE_GRADIENT: 1}
"""Transfers, and how far away the stage at their other end is."""
COMPLETIONS = {
    InstructionKind.COMPLETE_ACTIVATION: InstructionKind.SEND_ACTIVATION,
    InstructionKind.COMPLETE_GRADIENT: InstructionKind.SEND_GRADIENT,
}
UNBUFFERED = {InstructionKind.LOAD_MICRO_BATCH, *COMPLETIONS}


def uniform_timeline(name, shape, **costs):
    return simulate(stage_orders(schedule_named(name), shape), shape, OpCosts.uniform(shape, **costs))


@given(schedule_names, shapes())
def test_every_stage_runs_each_of_its_ops_once(name, shape):
    for stage, order in enumerate(stage_orders(schedule_named(name), shape)):
        expected = {
            Op(kind, stage, micro_batch, token_slice)
            for kind in OpKind
            for micro_batch in range(shape.num_micro_batches)
            for token_slice in range(shape.num_token_slices)
        }
        assert len(order) == len(expected) and set(order) == expected


@given(schedule_names, shapes(), st.data())
def test_no_op_starts_before_its_inputs_have_arrived(name, shape, data):
    costs = data.draw(costs_of(shape))
    orders = stage_orders(schedule_named(name), shape)
    timeline = simulate(orders, shape, costs)
    assert executed_order(timeline) == orders
    spans = {span.op: span for stage in timeline.spans for span in stage}
    for stage in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(stage))
    for op, start, end in spans.values():
        assert end == start + costs.duration(op)
        for needed in prerequisites(op, shape):
            assert spans[needed].end + (costs.transfer if needed.stage != op.stage else 0) <= start


@given(schedule_names, shapes(), st.floats(0.01, 100), st.floats(0.01, 100))
def test_bubble_and_makespan_have_their_closed_forms(name, shape, forward, backward):
    timeline = uniform_timeline(name, shape, forward=forward, backward=backward)
    units, warmup = shape.num_micro_batches * shape.num_token_slices, shape.num_stages - 1
    assert timeline.bubble_ratio == pytest.approx(warmup / (units + warmup), rel=0, abs=1e-9)
    assert timeline.makespan == pytest.approx((units + warmup) * (forward + backward), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@given(shape=shapes())
def test_peak_of_live_token_slices_has_its_closed_form(name, shape):
    peaks = uniform_timeline(name, shape).peak_live_token_slices
    assert list(peaks) == [PEAKS[name](shape, stage) for stage in range(shape.num_stages)]


@given(shapes(), st.data())
def test_uneven_token_slices_in_gpipe_order_take_what_terapipe_says(shape, data):
    # TeraPipe's latency (arXiv 2102.07988 section 3.3), both ways and for the units of all micro-batches in a row.
    row = st.lists(times, min_size=shape.num_token_slices, max_size=shape.num_token_slices).map(tuple)
    forward, backward = data.draw(row), data.draw(row)
    costs = OpCosts((forward,) * shape.num_stages, (backward,) * shape.num_stages)
    expected = sum(
        shape.num_micro_batches * sum(row) + (shape.num_stages - 1) * max(row) for row in (forward, backward)
    )
    assert simulate(stage_orders(gpipe, shape), shape, costs).makespan == pytest.approx(expected, rel=1e-9)


@given(schedule_names, shapes(4, 4, 4), st.data())
def test_slower_ops_and_longer_transfers_never_shorten_the_makespan(name, shape, data):
    orders = stage_orders(schedule_named(name), shape)
    costs = data.draw(costs_of(shape))
    makespan = simulate(orders, shape, costs).makespan
    more = data.draw(tables(shape))

    def slower(table):
        return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(table, more, strict=True))

    assert simulate(orders, shape, replace(costs, transfer=costs.transfer + data.draw(times))).makespan >= makespan
    assert simulate(orders, shape, replace(costs, forward=slower(costs.forward))).makespan >= makespan
    assert simulate(orders, shape, replace(costs, backward=slower(costs.backward))).makespan >= makespan


@given(shapes())
def test_token_slices_shrink_the_bubble_and_1f1b_keeps_less_alive_than_gpipe(shape):
    cut_finer = replace(shape, num_token_slices=shape.num_token_slices + 1)
    if shape.num_stages > 1:
        assert uniform_timeline("1f1b", cut_finer).bubble_ratio < uniform_timeline("1f1b", shape).bubble_ratio
    pairs = zip(
        uniform_timeline("1f1b", shape).peak_live_token_slices,
        uniform_timeline("gpipe", shape).peak_live_token_slices,
        strict=True,
    )
    assert all(least <= most for least, most in pairs)


@given(schedule_names, shapes())
def test_programs_compute_the_schedule_in_its_order(name, shape):
    orders = stage_orders(schedule_named(name), shape)
    assert [list(program.ops()) for program in lower(schedule_named(name), shape)] == orders


@given(schedule_names, shapes())
def test_buffers_hold_one_token_slice_at_a_time_and_are_few(name, shape):
    for program in lower(schedule_named(name), shape):
        owner: dict[int, tuple[int, int]] = {}
        for kind, micro_batch, token_slice, buffer in program.instructions:
            unit = micro_batch, token_slice
            if kind in UNBUFFERED:
                continue
            assert 0 <= buffer < program.num_buffers
            assert owner.setdefault(buffer, unit) == unit
            if kind is InstructionKind.FREE:
                del owner[buffer]
        assert not owner
        # One more than are live: the buffer of the forward whose message is already under way.
        assert program.num_buffers <= PEAKS[name](shape, program.stage) + 1


@given(schedule_names, shapes())
def test_a_channel_receives_in_the_order_of_its_sends(name, shape):
    sent, received = defaultdict(list), defaultdict(list)
    for program in lower(schedule_named(name), shape):
        for kind, micro_batch, token_slice, _ in program.instructions:
            if kind in SENDS:
                sent[program.stage, program.stage + SENDS[kind]].append((micro_batch, token_slice))
            elif kind in RECEIVES:
                received[program.stage + RECEIVES[kind], program.stage].append((micro_batch, token_slice))
    assert sent == received
    assert len(sent) == 2 * (shape.num_stages - 1)
    assert all(len(units) == shape.num_micro_batches * shape.num_token_slices for units in sent.values())


@given(schedule_names, shapes())
def test_a_receive_is_posted_before_its_consumer_and_at_most_one_op_ahead(name, shape):
    served = {InstructionKind.RECEIVE_ACTIVATION: OpKind.FORWARD, InstructionKind.RECEIVE_GRADIENT: OpKind.BACKWARD}
    for program in lower(schedule_named(name), shape):
        position = {op: index for index, op in enumerate(program.ops())}
        ops_done = 0
        for kind, micro_batch, token_slice, _ in program.instructions:
            if kind in served:
                consumer = Op(served[kind], program.stage, micro_batch, token_slice)
                assert 0 <= position[consumer] - ops_done <= 1
            ops_done += kind in COMPUTE


@given(schedule_names, shapes())
def test_a_send_follows_its_op_at_once(name, shape):
    made_by = {
        InstructionKind.SEND_ACTIVATION: InstructionKind.FORWARD,
        InstructionKind.SEND_GRADIENT: InstructionKind.BACKWARD,
    }
    for program in lower(schedule_named(name), shape):
        for before, send in pairwise(program.instructions):
            if send.kind in made_by:
                assert before == send._replace(kind=made_by[send.kind])


@given(schedule_names, shapes())
def test_the_first_and_the_last_stage_load_each_micro_batch_once_and_before_its_ops(name, shape):
    for program in lower(schedule_named(name), shape):
        loaded = []
        for kind, micro_batch, _, _ in program.instructions:
            if kind is InstructionKind.LOAD_MICRO_BATCH:
                loaded.append(micro_batch)
            elif kind in COMPUTE and program.stage in (0, shape.last_stage):
                assert micro_batch in loaded
        ends = program.stage in (0, shape.last_stage)
        assert loaded == (list(range(shape.num_micro_batches)) if ends else [])


@given(schedule_names, shapes())
def test_every_send_is_completed_once_and_not_before_it_is_sent(name, shape):
    for program in lower(schedule_named(name), shape):
        in_flight = set()
        for instruction in program.instructions:
            if instruction.kind in SENDS:
                in_flight.add(instruction._replace(buffer=-1))
            elif instruction.kind in COMPLETIONS:
                in_flight.remove(instruction._replace(kind=COMPLETIONS[instruction.kind]))
        assert not in_flight


@given(schedule_names, shapes(), st.integers(0, 2**32))
def test_programs_run_to_their_end_whichever_stage_is_faster(name, shape, seed):
    # A player of our own, with real queues: an op takes its message off the channel if it has arrived, a completion
    # waits until the other side has posted the receive. Nothing else ever waits.
    random = Random(seed)
    programs = lower(schedule_named(name), shape)
    position = [0] * shape.num_stages
    sent, posted = defaultdict(int), defaultdict(int)  # messages so far, by stage, direction
    number: dict[tuple[int, int, int, int], int] = {}  # of a message on its channel, as its receiver counts

    def step(stage):
        kind, micro_batch, token_slice, _ = programs[stage].instructions[position[stage]]
        if kind in SENDS:
            channel = stage + SENDS[kind], SENDS[kind]
            number[(*channel, micro_batch, token_slice)] = sent[channel]
            sent[channel] += 1
        elif kind in RECEIVES:
            posted[stage, -RECEIVES[kind]] += 1
        elif kind in COMPLETIONS:
            direction = SENDS[COMPLETIONS[kind]]
            channel = stage + direction, direction
            if posted[channel] <= number[(*channel, micro_batch, token_slice)]:
                return False
        elif kind in COMPUTE:
            direction = 1 if kind is InstructionKind.FORWARD else -1
            if 0 <= stage - direction < shape.num_stages:
                message = stage, direction, micro_batch, token_slice
                if message not in number:
                    return False
                assert number[message] < posted[stage, direction]
        position[stage] += 1
        return True

    running = list(range(shape.num_stages))
    blocked: set[int] = set()
    while running:
        candidates = [stage for stage in running if stage not in blocked]
        assert candidates, f"stages {running} wait for each other"
        stage = random.choice(candidates)
        if step(stage):
            blocked.clear()
        else:
            blocked.add(stage)
        running = [stage for stage in running if position[stage] < len(programs[stage].instructions)]


@settings(max_examples=5)
@given(schedule_names, st.integers(1, 16), st.integers(1, 24), st.integers(1, 16))
def test_large_pipelines_too(name, num_stages, num_micro_batches, num_token_slices):
    shape = PipelineShape(num_stages, num_micro_batches, num_token_slices)
    units, warmup = num_micro_batches * num_token_slices, num_stages - 1
    assert uniform_timeline(name, shape).bubble_ratio == pytest.approx(warmup / (units + warmup), rel=0, abs=1e-9)
    lower(one_f_one_b, shape)
