"""Deadlocks on devices: the model finds those of messages posted too early, and none in lowered programs."""

from collections import Counter
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import product
from random import Random

import pytest

from deepspeed_ext.plan.errors import ScheduleDeadlock
from deepspeed_ext.plan.ops import PipelineShape, Placement, result
from deepspeed_ext.plan.programs.device import (
    DeviceModel,
    Drains,
    Events,
    ExpertExchange,
    check_programs,
    num_streams,
)
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import ProvenSchedule, lower, lowering_costs
from deepspeed_ext.plan.programs.program import COMPUTES, RECEIVES, SENDS, Instruction, Program
from deepspeed_ext.plan.schedules import SCHEDULES, fixed, forward_order, interleaved, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from tests.strategies import WITH_MODEL_CHUNKS, random_orders

SMALL = [(p, m, s) for p in (2, 3, 4) for m in (1, 2, 4, 8) for s in (1, 2, 4, 8) if p * m * s <= 32]
HOST_FREE = DeviceModel(host_waits=False)
HOST_FREE_COLD = DeviceModel(host_waits=False, drains=Drains.NONE, warms_up=False)


def pipeline(name: str, ranks: int, micro_batches: int, token_slices: int, model_chunks: int = 2) -> PipelineShape:
    model_chunks = model_chunks if name == "interleaved" else 1
    return PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)


def with_early_posts(programs: list[Program], shape: PipelineShape) -> list[Program]:
    """Programs in which no message is held back: sent as its op ends, received one op ahead of its reader."""
    return [Program(each.rank, tuple(_with_early_posts(each, shape)), each.num_buffers) for each in programs]


def _with_early_posts(program: Program, shape: PipelineShape) -> list[Instruction]:
    others = [step for step in program.instructions if step.kind not in SENDS and step.kind not in RECEIVES]
    places = {result(op): place for place, op in enumerate(program.ops())}
    receives = [step for step in program.instructions if step.kind in RECEIVES]
    sends = {step.op: step for step in program.instructions if step.kind in SENDS}
    steps, place = [], 0

    def is_due(step: Instruction) -> bool:
        # A channel keeps its order, so a receive is due when a later one of its channel is.
        later = receives[receives.index(step) :]
        return any(places[each.op] <= place + 1 for each in later if each.kind is step.kind)

    for step in others:
        if step.kind in COMPUTES:
            due = list(filter(is_due, receives))
            receives = [receive for receive in receives if receive not in due]
            steps += [*due, step]
            place += 1
            if result(step.op) in sends:
                steps.append(sends[result(step.op)])
        else:
            steps.append(step)
    return steps


def is_locked(programs: list[Program], shape: PipelineShape, device: DeviceModel) -> bool:
    try:
        check_programs(programs, shape, device)
    except ScheduleDeadlock:
        return True
    return False


@pytest.mark.parametrize(
    ("device", "locked"),
    [
        # A drain anywhere on one rank; connections made in mid-step while ops block their hosts, or do not.
        (DeviceModel(host_waits=False), {"gpipe": 33, "1f1b": 15, "zero-bubble": 15, "interleaved": 23}),
        (
            DeviceModel(drains=Drains.NONE, warms_up=False),
            {"gpipe": 33, "1f1b": 15, "zero-bubble": 15, "interleaved": 21},
        ),
        (HOST_FREE_COLD, {"gpipe": 3, "1f1b": 3, "zero-bubble": 3, "interleaved": 3}),
    ],
    ids=["drain", "cold and blocking", "cold"],
)
def test_messages_posted_as_early_as_can_be_lock(device, locked):
    found = dict.fromkeys(locked, 0)
    for name in locked:
        for extents in SMALL:
            shape = pipeline(name, *extents)
            programs = with_early_posts(lower(schedule_named(name), shape), shape)
            locks = is_locked(programs, shape, device)
            found[name] += locks
            # One micro-batch is the case that token slices exist for.
            assert locks or extents[1] > 1 or device is HOST_FREE_COLD
    assert found == locked


def test_a_cold_connection_locks_where_each_rank_first_receives():
    shape = PipelineShape(num_stages=2, num_micro_batches=1)
    programs = with_early_posts(lower(SCHEDULES["1f1b"], shape), shape)
    check_programs(programs, shape, replace(HOST_FREE_COLD, warms_up=True))
    message = r"rank 0 at 'receive gradient 0BI0\.0 @0' waits for the host of the other end"
    with pytest.raises(ScheduleDeadlock, match=message):
        check_programs(programs, shape, HOST_FREE_COLD)


def test_a_drain_is_named_with_the_message_that_it_waits_for():
    shape = PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2)
    programs = with_early_posts(lower(SCHEDULES["1f1b"], shape), shape)
    message = (
        r"if rank 0 waits at 'send activation 0F0\.1 @1' for its device to run empty: 'receive gradient 0BI0\.1 @1'"
    )
    with pytest.raises(ScheduleDeadlock, match=message):
        check_programs(programs, shape)


def test_with_fewer_queues_than_streams_programs_must_end_with_every_assignment():
    shape = PipelineShape(num_stages=4, num_micro_batches=2, num_token_slices=4, num_model_chunks=2)
    programs = lower(SCHEDULES["interleaved"], shape)
    assert num_streams(shape) == 14
    assert check_programs(programs, shape, DeviceModel(hardware_queues=14))
    assert not check_programs(programs, shape)
    for queues in (1, 13):
        line = f"14 streams share {queues} hardware queues?: set CUDA_DEVICE_MAX_CONNECTIONS=32$"
        with pytest.raises(ScheduleDeadlock, match=line):
            check_programs(programs, shape, DeviceModel(hardware_queues=queues))


class Assigned(Events):
    """Events of streams that are dealt to hardware queues by a seed."""

    def __init__(self, programs: list[Program], shape: PipelineShape, device: DeviceModel, seed: int) -> None:
        random = Random(seed)
        self._queue_of = [random.randrange(random.choice((2, 3, 6))) for _ in range(num_streams(shape))]
        super().__init__(programs, shape, device)

    def _enqueue(self, event, stream, rank):
        super()._enqueue(event, stream, rank)
        queues, queue = vars(rank).setdefault("queues", {}), self._queue_of[stream]
        if queue in queues:
            self._needs[event].append(queues[queue])
        queues[queue] = event


def test_one_queue_for_all_streams_is_the_worst_assignment():
    locked = {"one queue": 0, "some assignment": 0}
    for seed, (_, _, shape, programs) in enumerate(drawn_programs()[::4]):
        if seed % 2:
            programs = with_early_posts(programs, shape)
        one = is_locked(programs, shape, DeviceModel(hardware_queues=1))
        locked["one queue"] += one
        for dealing in range(2):
            events = Assigned(programs, shape, DeviceModel(), 2 * seed + dealing)
            try:
                events.check_drains(events.levels())
            except ScheduleDeadlock:
                locked["some assignment"] += 1
                assert one
    assert locked["one queue"] > 5 and locked["some assignment"] > 5


def drawn_pipelines():
    """A few of the pipelines of `benchmarks.deadlock_proof`, which plays them all, and random orders."""
    random = Random(22)
    grid = [
        (ranks, micro_batches, token_slices, model_chunks)
        for ranks in range(2, 9)
        for micro_batches in range(1, 9)
        for token_slices in range(1, 9)
        for model_chunks in range(1, 5)
        if ranks * micro_batches * token_slices <= 64
    ]
    for ranks, micro_batches, token_slices, model_chunks in random.sample(grid, 20):
        for name in WITH_MODEL_CHUNKS if model_chunks > 1 else SCHEDULES:
            shape = PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)
            yield name, rank_orders(schedule_named(name), shape), shape
    for _ in range(30):
        ranks, micro_batches, token_slices, model_chunks = (random.randint(1, most) for most in (5, 4, 4, 3))
        placement = random.choice(list(Placement))
        shape = PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks, placement)
        yield "random", random_orders(shape, random), shape


@cache
def drawn_programs():
    """These pipelines and their programs, lowered once for several tests."""
    return [(name, orders, shape, lower(fixed(orders), shape)) for name, orders, shape in drawn_pipelines()]


def test_lowered_programs_end_on_any_device_or_the_setting_that_helps_is_named():
    for name, _, shape, programs in drawn_programs():
        assumes = check_programs(programs, shape, DeviceModel(hardware_queues=32))
        check_programs(programs, shape, DeviceModel(host_waits=False, warms_up=False))
        try:
            assert check_programs(programs, shape, DeviceModel(hardware_queues=1)) is assumes is False
        except ScheduleDeadlock as deadlock:
            assert assumes and name in ("interleaved", "random")
            assert str(deadlock).endswith("set CUDA_DEVICE_MAX_CONNECTIONS=32")


@pytest.mark.parametrize("placement", Placement)
def test_evaluations_end_with_every_assignment_of_streams(placement):
    evaluation = ProvenSchedule(forward_order, DeviceModel(hardware_queues=1), complete=False)
    for ranks, chunks in [(2, 1), (3, 2), (4, 3)]:
        shape = PipelineShape(ranks * chunks, 3, 4, chunks, placement)
        assert not evaluation.proof(shape).assumes_queues


def test_programs_of_a_first_step_end_though_all_ranks_drain_at_every_op():
    locked = with_one_queue = 0
    for name, orders, shape, programs in drawn_programs():
        settled = lower(fixed(orders), shape, under_ops=False)
        if is_locked(settled, shape, DeviceModel(drains=Drains.ALL_RANKS, hardware_queues=1)):
            assert name == "random"
            with_one_queue += 1
        locked += is_locked(programs, shape, DeviceModel(drains=Drains.ALL_RANKS))
        # Without a drain, every schedule with a name ends with every assignment of streams.
        assert name == "random" or not is_locked(programs, shape, DeviceModel(drains=Drains.NONE, hardware_queues=1))
    assert locked > 10 and with_one_queue > 1


WAITS = DeviceModel(exchange=ExpertExchange.ALLTOALL)


def test_forwards_may_drain_on_all_ranks_for_the_sizes_of_exchanges():
    """Programs that would lock send their messages between ops (the table of ADR 47); none with a name is refused."""
    shapes = [
        PipelineShape(ranks * chunks, micro_batches, token_slices, chunks, placement)
        for ranks, micro_batches, token_slices, chunks in product((2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3))
        for placement in (Placement if chunks > 1 else [Placement.LOOPED])
        if ranks * micro_batches * token_slices * chunks <= 24
    ]
    evaluation = ProvenSchedule(forward_order, WAITS, complete=False)
    tried, between_ops, early = Counter[str](), Counter[str](), 0
    for shape in shapes:
        chunked, v = shape.num_model_chunks > 1, shape.placement is Placement.V
        for name in ["evaluation", *(WITH_MODEL_CHUNKS if chunked else SCHEDULES)]:
            if name == "interleaved" and v:
                continue
            schedule = evaluation if name == "evaluation" else ProvenSchedule(schedule_named(name), WAITS)
            proof = schedule.proof(shape)
            assert proof.under_ops or (chunked and not v)
            tried[name] += chunked and not v
            between_ops[name] += not proof.under_ops
            programs, settled = (schedule.programs(shape, under_ops=each) for each in (True, False))
            for queues in (None, 1):
                drains = replace(WAITS, drains=Drains.FORWARDS, hardware_queues=queues)
                assert is_locked(programs, shape, drains) is not proof.under_ops
                assert not is_locked(settled, shape, replace(drains, drains=Drains.ALL_RANKS))
            early += name == "gpipe" and is_locked(with_early_posts(programs, shape), shape, drains)
    assert early > 10
    looped = {"evaluation": 9, "gpipe": 9, "interleaved": 9, "breadth-first": 6}
    assert tried == dict.fromkeys(looped, 31) | {"1f1b": 0, "zero-bubble": 0}
    assert between_ops == looped | {"1f1b": 0, "zero-bubble": 0}


def copies_lock(copies: list[list[Program]], shape: PipelineShape, device: DeviceModel) -> bool:
    """Whether copies of a pipeline lock whose ranks of a stage meet in every op, as in exchanges for experts."""
    graphs = [Events(programs, shape, device) for programs in copies]
    ops = [
        {
            programs[rank].instructions[position].op: event
            for (rank, position), event in graph._of_instruction.items()
            if programs[rank].instructions[position].kind in COMPUTES
        }
        for programs, graph in zip(copies, graphs, strict=True)
    ]
    sorter = TopologicalSorter[tuple[int, int]]()
    for number, graph in enumerate(graphs):
        for event, needs in enumerate(graph._needs):
            sorter.add((number, event), *((number, need) for need in needs))
        for op, event in ops[number].items():
            for other, of_other in enumerate(graphs):
                sorter.add((number, event), *((other, need) for need in of_other._needs[ops[other][op]]))
    try:
        sorter.prepare()
    except CycleError:
        return True
    return False


def test_copies_that_meet_in_every_op_end_where_one_does_if_they_run_one_program():
    devices = [
        DeviceModel(drains=drains, hardware_queues=queues)
        for drains, queues in product((Drains.NONE, Drains.ALL_RANKS), (None, 1))
    ]
    locked = 0
    for seed in range(12):
        shape = PipelineShape(4, 2, 2, num_model_chunks=2)
        programs = lower(fixed(random_orders(shape, Random(seed))), shape)
        for device in devices:
            one = copies_lock([programs], shape, device)
            assert copies_lock([programs] * 3, shape, device) is one
            locked += one
    assert 0 < locked < 12 * len(devices)


def test_copies_with_two_programs_may_lock_where_each_ends():
    """Programs of one order with and without messages under ops; and two orders."""
    drains = DeviceModel(drains=Drains.ALL_RANKS)
    shape = PipelineShape(9, 5, 1, num_model_chunks=3)
    programs, settled = (lower(interleaved, shape, under_ops=each) for each in (True, False))
    other = lower(SCHEDULES["gpipe"], shape, under_ops=False)
    for pair in [(programs, settled), (settled, other)]:
        assert [copies_lock([each], shape, drains) for each in pair] == [False, False]
        assert copies_lock([*pair], shape, drains)


def test_groups_of_experts_have_streams():
    shape = PipelineShape(4, 2, 4, num_model_chunks=2)
    for exchange, line in zip(ExpertExchange, ("14 streams", "16 streams", "16 streams"), strict=True):
        with pytest.raises(ScheduleDeadlock, match=f"{line} share 2 hardware queues"):
            check_programs(lower(interleaved, shape), shape, DeviceModel(hardware_queues=2, exchange=exchange))


def test_the_first_step_is_proven_for_shared_queues_too():
    """Its program may lock where those of later steps end."""
    shape = PipelineShape(num_stages=4, num_micro_batches=1, num_token_slices=3, num_model_chunks=2)
    schedule = fixed(random_orders(shape, Random(27)))
    check_programs(lower(schedule, shape), shape, DeviceModel(hardware_queues=1))
    assert ProvenSchedule(schedule, DeviceModel(hardware_queues=32)).proof(shape).assumes_queues
    with pytest.raises(ScheduleDeadlock, match=r"set CUDA_DEVICE_MAX_CONNECTIONS=32$"):
        ProvenSchedule(schedule, DeviceModel(hardware_queues=1)).proof(shape)


def test_the_model_and_the_simulator_have_one_makespan():
    shape = PipelineShape(num_stages=8, num_micro_batches=4, num_token_slices=4, num_model_chunks=2)
    costs = lowering_costs(shape)
    orders = rank_orders(SCHEDULES["interleaved"], shape)
    programs = lower(fixed(orders), shape)
    assert Events(programs, shape, HOST_FREE).makespan(costs) == simulate(orders, shape, costs).makespan
    early = with_early_posts(programs, shape)
    assert Events(early, shape, HOST_FREE).makespan(costs) == simulate(orders, shape, costs).makespan


def test_copies_have_streams_that_may_share_hardware_queues():
    shape = PipelineShape(4, 2, 4, num_model_chunks=2)
    copied = HostCopySettings((2,) * 4, (0,) * 4, (1,) * 4)
    streams = num_streams(shape) + 2
    lower(interleaved, shape, host_copies=copied, device=DeviceModel(hardware_queues=streams))
    with pytest.raises(ScheduleDeadlock, match=f"{streams} streams share {streams - 1} hardware queues"):
        lower(interleaved, shape, host_copies=copied, device=DeviceModel(hardware_queues=streams - 1))
