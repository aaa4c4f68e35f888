"""Properties of the programs of every schedule, and of random orders."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.device import DeviceModel, Events
from deepspeed_ext.plan.programs.lowering import lower, lowering_costs
from deepspeed_ext.plan.programs.program import InstructionKind, Program
from deepspeed_ext.plan.schedules import SCHEDULES, fixed, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from tests.strategies import WITH_MODEL_CHUNKS, orders_of_pipelines, pipelines

COMPUTE = {
    InstructionKind.FORWARD: OpKind.FORWARD,
    InstructionKind.BACKWARD: OpKind.BACKWARD,
    InstructionKind.INPUT_GRADIENT: OpKind.INPUT_GRADIENT,
    InstructionKind.WEIGHT_GRADIENT: OpKind.WEIGHT_GRADIENT,
}
# How far away the stage at the other end is.
SENDS = {InstructionKind.SEND_ACTIVATION: 1, InstructionKind.SEND_GRADIENT: -1}
PASSES = {InstructionKind.PASS_ACTIVATION: 1, InstructionKind.PASS_GRADIENT: -1}
RECEIVES = {InstructionKind.RECEIVE_ACTIVATION: -1, InstructionKind.RECEIVE_GRADIENT: 1}
COMPLETIONS = {
    InstructionKind.COMPLETE_ACTIVATION: InstructionKind.SEND_ACTIVATION,
    InstructionKind.COMPLETE_GRADIENT: InstructionKind.SEND_GRADIENT,
}
UNBUFFERED = {InstructionKind.LOAD_MICRO_BATCH, InstructionKind.REDUCE_GRADIENTS, *COMPLETIONS}


def check_buffers(program: Program) -> None:
    """No buffer holds two token slices at a time, and all are free at the end."""
    owner: dict[int, tuple[int, int, int]] = {}
    for kind, *unit, buffer in program.instructions:
        if kind in UNBUFFERED:
            continue
        assert 0 <= buffer < program.num_buffers
        assert owner.setdefault(buffer, tuple(unit)) == tuple(unit)
        if kind is InstructionKind.FREE:
            del owner[buffer]
    assert not owner


@given(pipelines())
def test_buffers_are_few(pipeline):
    name, shape = pipeline
    orders = rank_orders(schedule_named(name), shape)
    finer = shape.num_model_chunks * shape.num_token_slices
    peaks = CompiledOrders.of(orders, shape).peak_activation()
    for program, peak in zip(lower(fixed(orders), shape), peaks, strict=True):
        live = round(peak * finer)
        # In addition, those with a message under way: the next one, and those before it on its channel;
        # and those of which only a gradient remains that is sent later.
        held = most_gradients_held_back(program)
        assert live <= program.num_buffers <= live + held + (1 if shape.num_model_chunks == 1 else 3)
        assert not held or shape.num_model_chunks > 1


def most_gradients_held_back(program: Program) -> int:
    """The most gradients at a time that are computed and sent later than right after their op."""
    sends = {step[1:4] for step in program.instructions if step.kind is InstructionKind.SEND_GRADIENT}
    waiting, most = set(), 0
    for step in program.instructions:
        if step.kind in COMPUTE:
            most = max(most, len(waiting))
        if step.kind in (InstructionKind.BACKWARD, InstructionKind.INPUT_GRADIENT) and step[1:4] in sends:
            waiting.add(step[1:4])
        elif step.kind is InstructionKind.SEND_GRADIENT:
            waiting.discard(step[1:4])
    return most


def check_channels(programs: Sequence[Program], shape: PipelineShape) -> None:
    """A channel receives in the order of its sends, each message once."""
    sent, received = defaultdict(list), defaultdict(list)
    for program in programs:
        for kind, stage, *unit, _ in program.instructions:
            if kind in SENDS:
                way = SENDS[kind]
                sent[program.rank, shape.rank_of(stage + way), way].append((stage, *unit))
            elif kind in RECEIVES:
                way = -RECEIVES[kind]
                received[shape.rank_of(stage - way), program.rank, way].append((stage - way, *unit))
    assert sent == received
    messages = sum(map(len, sent.values()))
    boundaries = [shape.rank_of(stage) != shape.rank_of(stage + 1) for stage in range(shape.last_stage)]
    assert messages == 2 * sum(boundaries) * shape.num_micro_batches * shape.num_token_slices


def check_passes(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Results between two stages of a rank are passed on, and not sent."""
    for program in programs:
        passed = [(kind, stage) for kind, stage, *_ in program.instructions if kind in PASSES]
        assert all(shape.rank_of(stage + PASSES[kind]) == program.rank for kind, stage in passed)
        here = [stage for stage in range(shape.last_stage) if shape.rank_of(stage) == shape.rank_of(stage + 1)]
        units = shape.num_micro_batches * shape.num_token_slices
        assert len(passed) == 2 * units * sum(shape.rank_of(stage) == program.rank for stage in here)


@given(pipelines(max_model_chunks=1))
def test_a_receive_is_posted_before_its_consumer_and_at_most_one_op_ahead(pipeline):
    name, shape = pipeline
    backward = OpKind.INPUT_GRADIENT if name == "zero-bubble" else OpKind.BACKWARD
    served = {InstructionKind.RECEIVE_ACTIVATION: OpKind.FORWARD, InstructionKind.RECEIVE_GRADIENT: backward}
    for program in lower(schedule_named(name), shape):
        position = {op: index for index, op in enumerate(program.ops())}
        ops_done = 0
        for kind, *unit, _ in program.instructions:
            if kind in served:
                assert 0 <= position[Op(served[kind], *unit)] - ops_done <= 1
            ops_done += kind in COMPUTE


def check_sends(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Results are passed on at once, and sent after their op."""
    activations = (InstructionKind.FORWARD,)
    gradients = (InstructionKind.BACKWARD, InstructionKind.INPUT_GRADIENT)
    for program in programs:
        made = set()
        for before, after in pairwise(program.instructions):
            made.add(before[:4])
            if after.kind in SENDS or after.kind in PASSES:
                made_by = activations if (SENDS | PASSES)[after.kind] == 1 else gradients
                assert any((kind, *after[1:4]) in made for kind in made_by)
                assert after.kind in SENDS or (before.kind in made_by and before[1:] == after[1:])


def check_loads(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Each rank loads each micro-batch once, before all else."""
    for program in programs:
        loaded = []
        for kind, _, micro_batch, *_ in program.instructions:
            if kind is InstructionKind.LOAD_MICRO_BATCH:
                loaded.append(micro_batch)
            else:  # before its first receive, as shapes may depend on the data
                assert micro_batch in loaded
        assert sorted(loaded) == list(range(shape.num_micro_batches))


def check_completions(programs: Sequence[Program], shape: PipelineShape) -> None:
    """Every send is completed once, and not before it is sent."""
    for program in programs:
        in_flight = set()
        for instruction in program.instructions:
            if instruction.kind in SENDS:
                in_flight.add(instruction._replace(buffer=-1))
            elif instruction.kind in COMPLETIONS:
                in_flight.remove(instruction._replace(kind=COMPLETIONS[instruction.kind]))
        assert not in_flight


class Player:
    """Runs programs with queues of its own, a step of any rank at a time.

    An op takes its message off the channel if it has arrived, and results of its own rank are there; a completion waits
    until the other side has posted the receive. Nothing else ever waits.
    """

    def __init__(self, programs: Sequence[Program], shape: PipelineShape) -> None:
        self.programs, self.shape = programs, shape
        self.position = [0] * len(programs)
        self.sent: dict[tuple, int] = defaultdict(int)
        self.posted: dict[tuple, int] = defaultdict(int)
        # Number of a message on its channel, by way and reader; results that a rank passed to itself; and its ops.
        self.number: dict[tuple, int] = {}
        self.passed: set[tuple] = set()
        self.computed: set[tuple] = set()

    def step(self, rank: int) -> bool:
        """Run the next instruction, unless it must wait."""
        kind, stage, *unit, _ = self.programs[rank].instructions[self.position[rank]]
        runs = True
        if kind in PASSES:
            self.passed.add((PASSES[kind], stage + PASSES[kind], *unit))
        elif kind in SENDS:
            way = SENDS[kind]
            channel = rank, self.shape.rank_of(stage + way), way
            self.number[way, stage + way, *unit] = self.sent[channel]
            self.sent[channel] += 1
        elif kind in RECEIVES:
            way = -RECEIVES[kind]
            self.posted[self.shape.rank_of(stage - way), rank, way] += 1
        elif kind in COMPLETIONS:
            way = SENDS[COMPLETIONS[kind]]
            channel = rank, self.shape.rank_of(stage + way), way
            runs = self.posted[channel] > self.number[way, stage + way, *unit]
        elif kind in COMPUTE:
            runs = self.compute(rank, COMPUTE[kind], stage, *unit)
        self.position[rank] += runs
        return runs

    def compute(self, rank: int, kind: OpKind, stage: int, micro_batch: int, token_slice: int) -> bool:
        """Run an op if its message is there. Results of its own rank must have been computed."""
        unit = stage, micro_batch, token_slice
        if kind is OpKind.WEIGHT_GRADIENT:
            assert ("B", *unit) in self.computed
            return True
        way = 1 if kind is OpKind.FORWARD else -1
        if 0 <= stage - way < self.shape.num_stages:
            message = way, *unit
            source = self.shape.rank_of(stage - way)
            if source == rank:
                assert message in self.passed
            elif message not in self.number:
                return False
            else:
                assert self.number[message] < self.posted[source, rank, way]
        if way == 1:
            assert token_slice == 0 or ("F", stage, micro_batch, token_slice - 1) in self.computed
        else:
            assert ("F", *unit) in self.computed
            last = token_slice == self.shape.last_token_slice
            assert last or ("B", stage, micro_batch, token_slice + 1) in self.computed
        self.computed.add(("F" if way == 1 else "B", *unit))
        return True

    def run(self, random: Random) -> None:
        """Run all programs to their end, ranks at random speeds."""
        running = list(range(len(self.programs)))
        blocked: set[int] = set()
        while running:
            candidates = [rank for rank in running if rank not in blocked]
            assert candidates, f"ranks {running} wait for each other"
            rank = random.choice(candidates)
            if self.step(rank):
                blocked.clear()
            else:
                blocked.add(rank)
            running = [rank for rank in running if self.position[rank] < len(self.programs[rank].instructions)]


@given(orders_of_pipelines(), st.integers(0, 2**32))
def test_programs_of_any_order(orders_and_shape, seed):
    orders, shape = orders_and_shape
    programs = lower(fixed(orders), shape)
    assert [list(program.ops()) for program in programs] == orders
    for program in programs:
        check_buffers(program)
    for check in (check_channels, check_passes, check_sends, check_loads, check_completions):
        check(programs, shape)
    # No message is delayed on the timeline that programs are lowered from.
    costs = lowering_costs(shape)
    on_device = Events(programs, shape, DeviceModel(host_waits=False)).makespan(costs)
    assert on_device == pytest.approx(simulate(orders, shape, costs).makespan, abs=1e-9)
    # They end whichever rank is faster.
    Player(programs, shape).run(Random(seed))


MOST_RANKS, MOST_MICRO_BATCHES, MOST_TOKEN_SLICES, MOST_MODEL_CHUNKS = 16, 32, 32, 4


def drawn_shapes(number):
    """Schedules and shapes, small ones more often than large ones, so that hundreds take seconds to lower."""
    random = Random(1)

    def extent(most: int) -> int:
        return min(int(exp(random.random() ** 2 * log(most + 1))), most)

    for index in range(number):
        name = sorted(SCHEDULES)[index % len(SCHEDULES)]
        model_chunks = random.randint(1, MOST_MODEL_CHUNKS) if name in WITH_MODEL_CHUNKS else 1
        ranks = extent(MOST_RANKS)
        yield (
            name,
            PipelineShape(ranks * model_chunks, extent(MOST_MICRO_BATCHES), extent(MOST_TOKEN_SLICES), model_chunks),
        )


def test_many_shapes_run_without_deadlock_or_buffers_that_overlap(all_setups):
    seen = [0, 0, 0, 0]
    for name, shape in drawn_shapes(1000 if all_setups else 100):
        for program in lower(schedule_named(name), shape):
            check_buffers(program)
        extents = shape.num_ranks, shape.num_micro_batches, shape.num_token_slices, shape.num_model_chunks
        seen = [max(each) for each in zip(seen, extents, strict=True)]
    most = [MOST_RANKS, MOST_MICRO_BATCHES, MOST_TOKEN_SLICES, MOST_MODEL_CHUNKS]
    assert seen == most if all_setups else all(extent > 0.9 * each for extent, each in zip(seen, most, strict=True))
