"""Messages on communicators that run a rank's messages one after the other, as NCCL's do."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

import pytest
from hypothesis import given

from deepspeed_ext.plan.ops import Op, PipelineShape, Placement, prerequisites, reader_of, received, result
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import (
    COMPLETE,
    COMPUTE,
    MESSAGE_CTAS,
    RECEIVE,
    SEND,
    Channel,
    Program,
    channel_of,
    channels,
    communicators,
    warm_up_order,
)
from deepspeed_ext.plan.schedules import fixed, one_f_one_b
from tests.strategies import orders_of_pipelines


def plays(programs: Sequence[Program], shape: PipelineShape, communicator: Callable[[Channel], Hashable]) -> bool:
    """Whether programs end if a send or a receive runs only when those the rank posted before it have run.

    Posting never waits; a message goes over when both its ends are the next of their ranks on their communicator.
    """
    queues: dict[tuple[int, Hashable], deque[Op]] = defaultdict(deque)
    positions = [0] * len(programs)
    there: set[Op] = set()
    given_over: set[Op] = set()

    def steps(program: Program) -> int:
        """Instructions that run at once."""
        before = positions[program.rank]
        for instruction in program.instructions[before:]:
            kind, op = instruction.kind, instruction.op
            if kind in COMPUTE.values():
                needed = received(op, shape)
                mine = [each for each in prerequisites(op, shape) if each != needed]
                comes = needed is not None and shape.rank_of(needed.stage) != program.rank
                if not there.issuperset(mine) or (
                    needed is not None and needed not in (given_over if comes else there)
                ):
                    break
                there.add(result(op))
            elif kind in COMPLETE.values() and op not in given_over:
                break
            elif kind in RECEIVE.values() or kind in SEND.values():
                reader = op if kind in RECEIVE.values() else reader_of(op, shape)
                message, channel = received(reader, shape), channel_of(reader, shape)
                queues[program.rank, communicator(channel)].append(message)
            positions[program.rank] += 1
        return positions[program.rank] - before

    def messages() -> int:
        """Messages that go over at once."""
        heads = [queue[0] for queue in queues.values() if queue]
        ready = {message for message in heads if heads.count(message) == 2}
        for queue in queues.values():
            if queue and queue[0] in ready:
                queue.popleft()
        given_over.update(ready)
        return len(ready)

    while sum(map(steps, programs)) + messages():
        pass
    return all(position == len(program.instructions) for position, program in zip(positions, programs, strict=True))


@given(orders_of_pipelines())
def test_a_rank_has_one_channel_on_a_communicator(orders_and_shape) -> None:
    _, shape = orders_and_shape
    numbers = communicators(shape)
    assert list(numbers) == channels(shape)
    ends = [(number, rank) for channel, number in numbers.items() for rank in channel[:2]]
    assert len(ends) == len(set(ends))
    most = max(Counter(rank for _, rank in ends).values(), default=0)
    folds = shape.placement is Placement.V and shape.num_model_chunks > 1
    assert most * MESSAGE_CTAS <= (16 if folds else 8), "messages hold few multiprocessors"
    # Connections are made in one order on all ranks.
    order = warm_up_order(shape)
    assert sorted(order) == channels(shape)
    assert [numbers[channel] for channel in order] == sorted(numbers.values())


@given(orders_of_pipelines())
def test_programs_end_on_their_communicators(orders_and_shape) -> None:
    orders, shape = orders_and_shape
    numbers = communicators(shape)
    assert plays(lower(fixed(orders), shape), shape, numbers.__getitem__)


def test_one_communicator_for_all_channels_would_lock() -> None:
    shape = PipelineShape(num_stages=2, num_micro_batches=2, num_token_slices=2)
    programs = lower(one_f_one_b, shape)
    assert not plays(programs, shape, lambda channel: 0)
    assert plays(programs, shape, communicators(shape).__getitem__)


@pytest.mark.parametrize(
    ("num_ranks", "num_model_chunks", "placement", "expected"),
    [
        (1, 2, Placement.LOOPED, 0),
        (2, 1, Placement.LOOPED, 2),
        (16, 1, Placement.LOOPED, 4),
        (2, 2, Placement.LOOPED, 4),
        (16, 4, Placement.LOOPED, 4),
        (16, 2, Placement.V, 8),
    ],
)
def test_there_are_as_many_as_a_rank_has_channels(num_ranks, num_model_chunks, placement, expected) -> None:
    shape = PipelineShape(num_ranks * num_model_chunks, 1, 1, num_model_chunks, placement)
    assert len(set(communicators(shape).values())) == expected
