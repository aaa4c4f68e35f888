"""A stage's four channels: activations in and out, gradients in and out."""

from collections.abc import Callable, Hashable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.runtime.channels import Incoming, MessageSpec, Outgoing, ShapeBook, TensorSpec
from deepspeed_ext.runtime.topology import TokenSliceTopology

Unit = tuple[int, int]
"""Micro-batch and token slice: what a message belongs to."""


class StageLinks:
    """Channels to the neighbouring stages, and what is known of the messages on them.

    Args:
        topology: of all ranks; every rank must make its links at the same time, since groups are made together.
        rank: this rank.
        device: where tensors arrive.
        timeout: how long a transfer may take.
        activation_rule: shapes of the activation of a token slice, by index, when the model can say.
        dynamic_shape: announce the shapes of every message.
    """

    def __init__(
        self,
        topology: TokenSliceTopology,
        rank: int,
        device: torch.device,
        *,
        timeout: timedelta,
        activation_rule: Callable[[int], MessageSpec] | None,
        dynamic_shape: bool,
    ) -> None:
        coordinate = topology.get_coord(rank)
        last_stage = topology.get_dim("pipe") - 1
        self._dynamic_shape = dynamic_shape
        self._phase = ""
        rule = None if activation_rule is None or dynamic_shape else (lambda kind: activation_rule(kind[1]))
        # One book for each channel: both of its ends learn from the same messages, and from no others.
        self._activations_in, self._activations_out = ShapeBook(rule), ShapeBook(rule)
        self._gradients_in, self._gradients_out = ShapeBook(), ShapeBook()
        downstream, upstream = _pipe_groups(topology, rank, timeout) if last_stage else (None, None)
        self._from_previous = self._to_previous = self._from_next = self._to_next = None
        if coordinate.pipe > 0:
            previous = topology.get_rank(**coordinate._replace(pipe=coordinate.pipe - 1)._asdict())
            self._from_previous = Incoming(previous, downstream, self._activations_in, device)
            self._to_previous = Outgoing(previous, upstream, self._gradients_out)
        if coordinate.pipe < last_stage:
            following = topology.get_rank(**coordinate._replace(pipe=coordinate.pipe + 1)._asdict())
            self._to_next = Outgoing(following, downstream, self._activations_out)
            self._from_next = Incoming(following, upstream, self._gradients_in, device)

    @property
    def num_messages(self) -> int:
        """Tensors sent so far by this rank, headers included."""
        return sum(channel.num_messages for channel in (self._to_previous, self._to_next) if channel is not None)

    def begin(self, phase: str) -> None:
        """Start a batch of a phase, `train` or `eval`: each has its own shapes."""
        self._phase = phase
        if self._dynamic_shape:
            self.forget_shapes()

    def forget_shapes(self) -> None:
        """Let the next batch have other shapes."""
        for book in (self._activations_in, self._activations_out, self._gradients_in, self._gradients_out):
            book.clear()

    def post_activation(self, unit: Unit) -> None:
        """Expect the activation of a token slice from the stage before."""
        self._from_previous.post(unit, self._kind(unit))

    def activation(self, unit: Unit) -> tuple[Tensor, ...]:
        """Wait for an activation; what needs a gradient arrives as a leaf."""
        tensors = self._from_previous.wait(unit)
        self._gradients_out.learn(self._kind(unit), _gradients_of(tensors))
        return tensors

    def send_activation(self, unit: Unit, tensors: tuple[Tensor, ...]) -> None:
        """Post an activation to the stage after."""
        self._gradients_in.learn(self._kind(unit), _gradients_of(tensors))
        self._to_next.send(unit, self._kind(unit), tensors)

    def complete_activation(self, unit: Unit) -> None:
        """Let go of a sent activation once it has left."""
        self._to_next.complete(unit)

    def post_gradient(self, unit: Unit) -> None:
        """Expect the gradients of an activation that was sent."""
        self._from_next.post(unit, self._kind(unit))

    def gradient(self, unit: Unit) -> tuple[Tensor, ...]:
        """Wait for the gradients of an activation: one for each tensor of it that requires one."""
        return self._from_next.wait(unit)

    def send_gradient(self, unit: Unit, gradients: tuple[Tensor, ...]) -> None:
        """Post the gradients of a received activation to the stage before."""
        self._to_previous.send(unit, self._kind(unit), gradients)

    def complete_gradient(self, unit: Unit) -> None:
        """Let go of a sent gradient once it has left."""
        self._to_previous.complete(unit)

    def _kind(self, unit: Unit) -> Hashable:
        """Messages of a kind have the same shapes: those of one token slice, or of one micro-batch if dynamic."""
        micro_batch, token_slice = unit
        return (self._phase, token_slice, micro_batch if self._dynamic_shape else None)


def _gradients_of(activation: tuple[Tensor, ...]) -> MessageSpec:
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, False) for tensor in activation if tensor.requires_grad)


def _pipe_groups(
    topology: TokenSliceTopology, rank: int, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's communicators for activations and for gradients."""
    mine = None
    for ranks in topology.get_axis_comm_lists("pipe"):
        pair = dist.new_group(ranks, timeout=timeout), dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            mine = pair
    assert mine is not None, "every rank is on the pipe axis"
    return mine
