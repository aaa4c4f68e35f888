"""A pipeline rank's channels: one for each neighbour, for activations and for gradients."""

from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.plan.dependencies import received
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.program import Channel, channel_of, communicators, warm_up_order
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.channels import Incoming, MessageSpec, Outgoing, ShapeBook, TensorSpec
from deepspeed_ext.runtime.topology import TokenSliceTopology, own_group


class _MessageKind(NamedTuple):
    """Messages of a kind have the same shapes: those of a stage and token slice; of one micro-batch, if dynamic."""

    phase: Hashable
    stage: int
    token_slice: int
    length: int
    micro_batch: int | None


class RankLinks:
    """Channels to the ranks of neighbouring stages, and what is known of the messages on them.

    A message is named by the op that reads it: `1F0.3` waits for the activation of stage 0, `1BI0.3` for a gradient
    of stage 2.

    Args:
        topology: coordinates of all ranks. Every rank must make its links at the same time, with its groups.
        activation_rule: shapes of the activation of some tokens, when the model can say.
        dynamic_shape: announce the shapes of every message.
    """

    def __init__(
        self,
        topology: TokenSliceTopology,
        rank: int,
        shape: PipelineShape,
        device: torch.device,
        *,
        timeout: timedelta,
        activation_rule: Callable[[int], MessageSpec] | None,
        dynamic_shape: bool,
    ) -> None:
        coordinate = topology.get_coord(rank)
        own_rank = coordinate.pipe
        self._shape = shape
        self._dynamic_shape = dynamic_shape
        self._phase: Hashable = ""
        self._parts: Callable[[int], TokenSlices] | None = None
        rule = None if activation_rule is None or dynamic_shape else (lambda kind: activation_rule(kind.length))
        self._incoming: dict[Channel, Incoming] = {}
        self._outgoing: dict[Channel, Outgoing] = {}
        self._peers: dict[Channel, int] = {}
        # One book for each end of a channel: both ends learn from the same messages, and from no others.
        self._books: dict[Channel, ShapeBook] = {}
        numbers = communicators(shape)
        groups = self.groups = _groups(topology, len(set(numbers.values())), timeout)
        """Communicators of the channels."""
        for channel, number in numbers.items():
            if own_rank not in channel[:2]:
                continue
            book = self._books[channel] = ShapeBook(rule if channel.result is OpKind.FORWARD else None)
            group = groups[number]
            other = channel.source + channel.target - own_rank
            peer = self._peers[channel] = topology.get_rank(**coordinate._replace(pipe=other)._asdict())
            if channel.target == own_rank:
                self._incoming[channel] = Incoming(peer, group, book, device)
            else:
                self._outgoing[channel] = Outgoing(peer, group, book)
        self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Use every channel once, so that no rank waits for a connection in the middle of a step (ADR 22)."""
        number = torch.zeros(1, device=device)
        for channel in warm_up_order(self._shape):
            if (incoming := self._incoming.get(channel)) is not None:
                dist.recv(number, self._peers[channel], group=incoming.group)
            elif (outgoing := self._outgoing.get(channel)) is not None:
                dist.send(number, self._peers[channel], group=outgoing.group)

    @property
    def num_messages(self) -> int:
        """Tensors sent so far by this rank, headers included."""
        return sum(channel.num_messages for channel in self._outgoing.values())

    def begin(self, phase: Hashable, shape: PipelineShape, parts: Callable[[int], TokenSlices]) -> None:
        """Start a batch of a phase, such as `train` or `eval`: each phase has its own shapes.

        Args:
            parts: this rank's part of each token slice of a micro-batch, which is known before messages are posted.
        """
        self._phase, self._shape, self._parts = phase, shape, parts
        if self._dynamic_shape:
            self.forget_shapes()

    def forget_shapes(self) -> None:
        """Let the next batch have other shapes."""
        for book in self._books.values():
            book.clear()

    def post(self, reader: Op) -> None:
        """Expect what an op reads of another rank."""
        self._incoming[self._channel(reader)].post(reader, self._kind(reader))

    def wait(self, reader: Op) -> tuple[Tensor, ...]:
        """Wait for a message and return its tensors [...]. Activations that need a gradient are leaves."""
        channel = self._channel(reader)
        tensors = self._incoming[channel].wait(reader)
        if channel.result is OpKind.FORWARD:
            self._learn_gradients(reader, tensors)
        return tensors

    def send(self, reader: Op, tensors: tuple[Tensor, ...]) -> None:
        """Post a message to the rank of an op.

        Args:
            tensors: tensors [...] of any shape.
        """
        channel = self._channel(reader)
        if channel.result is OpKind.FORWARD:
            self._learn_gradients(reader, tensors)
        self._outgoing[channel].send(reader, self._kind(reader), tensors)

    def complete(self, reader: Op) -> None:
        """Let go of a sent message once it has left."""
        self._outgoing[self._channel(reader)].complete(reader)

    def over(self, reader: Op) -> Callable[[], bool] | None:
        """Return a function that tells whether the transfer of a message is over, on the accelerator too.

        Returns:
            The function; None if the transfer is not posted yet.
        """
        channel = self._channel(reader)
        return (self._incoming if channel in self._incoming else self._outgoing)[channel].over(reader)

    def peer(self, reader: Op) -> int:
        """Global rank at the other end of a message."""
        return self._peers[self._channel(reader)]

    def _channel(self, reader: Op) -> Channel:
        channel = channel_of(reader, self._shape)
        assert channel is not None, "only ops that read of another stage have a message"
        return channel

    def _learn_gradients(self, reader: Op, activation: tuple[Tensor, ...]) -> None:
        """The gradients of an activation have its shapes: both ends know them before they travel back."""
        needed = received(reader, self._shape)
        assert needed is not None, "an activation comes from another stage"
        answer = needed._replace(kind=OpKind.INPUT_GRADIENT)
        wanted = [tensor for tensor in activation if tensor.requires_grad]
        spec = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, False) for tensor in wanted)
        self._books[self._channel(answer)].learn(self._kind(answer), spec)

    def _kind(self, reader: Op) -> _MessageKind:
        micro_batch = reader.micro_batch if self._dynamic_shape else None
        assert self._parts is not None, "a batch has begun"
        length = self._parts(reader.micro_batch).lengths[reader.token_slice]
        return _MessageKind(self._phase, reader.stage, reader.token_slice, length, micro_batch)


def _groups(topology: TokenSliceTopology, num_communicators: int, timeout: timedelta) -> list[dist.ProcessGroup]:
    """This rank's communicators, in the order of the numbers that the plan gives them.

    A group spans the pipeline, though a rank uses it with one other: few groups that serve many pairs are made sooner
    than one for each pair.
    """
    pipelines = topology.get_axis_comm_lists("pipe")
    return [own_group(pipelines, timeout) for _ in range(num_communicators)]
