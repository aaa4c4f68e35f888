"""Where in the orders of two ranks the ends of each message are posted, so that no device can lock.

A posted message is a kernel that runs until the other end is there. So whatever waits for a device to run empty (an
allocator that returns memory, a module that is loaded: a drain) waits for all messages posted before. It must not be
that one of these waits, over any number of ranks, for what comes after the drain. Two rules see to it. They read the
simulated timeline, in which an op that depends on another starts no earlier than that one ends:

- A receive is posted one op ahead of its reader, but not before an op that ends by the time its producer starts.
- A send is posted right after its op, but not before an op that ends by the time at which the op before the receive
  starts.

    rank 0 | [0F0.0]   x   [0B0.0     ]        The gradient for 0B0.0 could be received from the start of 0F0.0 on,
    rank 1 |        [1F0.0][1B0.0     ]        one op ahead. But 1B0.0 starts after 0F0.0 has ended and may need
                                               it, so the receive is posted behind it, at x.

Holding an end back costs nothing on this timeline: the other end is not there earlier. ADR 22 has the proof.

Where all ranks may drain at every op, as in a first step, in which each loads its kernels, no message may be under way
while an op of its ranks runs. Then a receive is posted right in front of its reader, and a send where the op before
that receive has ended. Ops by their start and messages by the end of that op have one order on all ranks.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.dependencies import reader_of, received, result
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.program import Channel
from deepspeed_ext.plan.timeline import Span

_NOTHING = Span(Op(OpKind.FORWARD, 0, 0, 0), -inf, -inf)
"""In front of the first op of a rank."""


class Posting(NamedTuple):
    """Where the ends of one message are posted: a place p is in front of op p of a rank's order, or behind all ops."""

    message: Op
    """The result that travels, as `dependencies.result` names it."""
    send: int
    """Place on the sending rank."""
    expected: float
    """When the receiver is nearly there: messages that are sent at one place go in the order of these."""
    receive: int
    """Place on the receiving rank."""
    reader: int
    """Op that the receive must precede: the reader, or an earlier one that reads a later message of the channel."""
    complete: int
    """Place on the sending rank at which the send has surely been received."""


class RankMessages:
    """The messages that one rank gives and reads.

    Attributes:
        spans: its ops.
        given: per channel, the messages in the order of their ops, each with the place of its op.
        readers: per message, the place of the op that reads it.
    """

    def __init__(self, rank: int, spans: Sequence[Span], shape: PipelineShape) -> None:
        self.spans = spans
        self.given: dict[Channel, list[tuple[Op, int]]] = defaultdict(list)
        self.readers: dict[Op, int] = {}
        ranks = [shape.rank_of(stage) for stage in range(shape.num_stages)]
        for place, span in enumerate(spans):
            message, reader = result(span.op), reader_of(result(span.op), shape)
            if reader is not None and ranks[reader.stage] != rank:
                self.given[Channel(rank, ranks[reader.stage], message.kind)].append((message, place))
            needed = received(span.op, shape)
            if needed is not None and ranks[needed.stage] != rank:
                self.readers[needed] = place


def postings(
    channel: Channel, source: RankMessages, target: RankMessages, *, under_ops: bool = True
) -> Iterator[Posting]:
    """Yield where the messages of a channel are posted, in their order.

    Args:
        channel: from one rank to another.
        source: messages of the rank that sends.
        target: messages of the rank that receives.
    """
    # Without their backwards, as in an evaluation, some results have no reader.
    messages = [(message, place) for message, place in source.given[channel] if message in target.readers]
    # Receives keep the order of the sends, so one is due when any that follows it is.
    due = list(accumulate((target.readers[message] for message, _ in reversed(messages)), min))[::-1]
    send = receive = 0
    starts = [span.start for span in source.spans]
    for (message, producer), reader in zip(messages, due, strict=True):
        begins = source.spans[producer].start
        receive = max(receive, reader - under_ops)
        while target.spans[receive].end <= begins:
            receive += 1
        before = target.spans[receive - 1] if receive else _NOTHING
        expected = before.start if under_ops else before.end
        send = max(send, producer + 1)
        while send < len(source.spans) and _is_over(source.spans[send], expected, under_ops):
            send += 1
        complete = max(send, bisect_left(starts, target.spans[target.readers[message]].end))
        yield Posting(message, send, expected, receive, reader, complete)


def _is_over(span: Span, time: float, under_ops: bool) -> bool:
    """Whether a message that is expected at a time need not be sent in front of an op."""
    return span.end <= time if under_ops else span.start < time
