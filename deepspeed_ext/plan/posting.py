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
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.dependencies import reader_of, received, result
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs import Channel
from deepspeed_ext.plan.timeline import Span


class Posting(NamedTuple):
    """Where the ends of one message are posted: a place p is in front of op p of a rank's order, or behind all ops."""

    message: Op
    """The result that travels, as `dependencies.result` names it."""
    send: int
    """Place on the sending rank."""
    expected: float
    """Start of the op before the receive: messages that are sent at one place go in the order of these."""
    receive: int
    """Place on the receiving rank."""
    reader: int
    """Op that the receive must precede: the reader, or an earlier one that reads a later message of the channel."""
    complete: int
    """Place on the sending rank at which the send has surely been received."""


class RankMessages:
    """The messages that one rank gives and reads.

    Args:
        rank: the pipeline rank.
        spans: its ops.
        shape: extent of the pipeline.

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


def postings(channel: Channel, source: RankMessages, target: RankMessages) -> Iterator[Posting]:
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
        receive = max(receive, reader - 1)
        while target.spans[receive].end <= begins:
            receive += 1
        expected = target.spans[receive - 1].start if receive else -inf
        send = max(send, producer + 1)
        while send < len(source.spans) and source.spans[send].end <= expected:
            send += 1
        complete = max(send, bisect_left(starts, target.spans[target.readers[message]].end))
        yield Posting(message, send, expected, receive, reader, complete)
