"""Messages between neighbouring stages: posted in order, without a wait.

`Outgoing` and `Incoming` are one direction between two ranks; `RankLinks` are all channels of one pipeline rank, one
for each neighbour, for activations and for gradients.

A channel has one direction, from one stage to its neighbour, and a communicator of its own: NCCL runs the messages of a
communicator one after the other, so activations and gradients on one communicator would wait for each other.

A message is a tuple of tensors. If both ends have their shapes (`ShapeBook`), only the tensors are sent. Otherwise a
header of `_HEADER_LENGTH` numbers precedes the first message of each kind.
"""

from collections import deque
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, received
from deepspeed_ext.plan.programs.program import MESSAGE_CTAS, Channel, channel_of, communicators, warm_up_order
from deepspeed_ext.runtime.live_batch import LiveBatch
from deepspeed_ext.runtime.topology import TokenSliceTopology, own_group

_HEADER_LENGTH = 128
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Types that every backend can send. NCCL has no integers of 16 bits."""


class TensorSpec(NamedTuple):
    """Shape and type of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describe a tensor of any shape [...]."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


MessageSpec = tuple[TensorSpec, ...]


class ShapeBook:
    """The shapes of messages by kind, the same at both ends of a channel.

    Args:
        rule: computes the shapes of a kind of message; None to read them from headers.
    """

    def __init__(self, rule: Callable[[Hashable], MessageSpec] | None = None) -> None:
        self._rule = rule
        self._known: dict[Hashable, MessageSpec] = {}

    def find(self, kind: Hashable) -> MessageSpec | None:
        """Shapes of a kind of message, or None if they are not known yet."""
        if kind not in self._known and self._rule is not None:
            self._keep(kind, self._rule(kind))
        return self._known.get(kind)

    def note(self, kind: Hashable, spec: MessageSpec) -> None:
        """Note the shapes of a kind of message. If they changed, the receiver would read garbage."""
        known = self.find(kind)
        if known is not None and known != spec:
            raise UserError(
                f"activations changed from {_describe(known)} to {_describe(spec)}: keep one shape, build the module "
                "with dynamic_shape=True, or call reset_activation_shape() on every rank before the change"
            )
        self._keep(kind, spec)

    def _keep(self, kind: Hashable, spec: MessageSpec) -> None:
        if refused := tuple(entry for entry in spec if entry.dtype not in _DTYPES):
            raise UserError(
                f"stages exchange {_describe(refused)}, a type that NCCL cannot send: pass another type, such as int32 "
                "instead of int16"
            )
        self._known[kind] = spec

    def clear(self) -> None:
        """Forget all shapes."""
        self._known.clear()


class Outgoing:
    """The sending end of a channel."""

    def __init__(self, peer: int, group: dist.ProcessGroup, shapes: ShapeBook) -> None:
        self.peer, self.group, self.shapes = peer, group, shapes
        self._in_flight: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}
        self.num_messages = 0
        """Tensors posted so far, headers included."""

    def send(self, name: Hashable, kind: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Post a message of tensors [...], of one shape for all of a kind; they stay alive until `complete(name)`."""
        spec = tuple(TensorSpec.of(tensor) for tensor in tensors)
        self._in_flight[name] = []
        is_known = self.shapes.find(kind) is not None
        self.shapes.note(kind, spec)
        if not is_known:
            self._post(name, _header(spec).to(tensors[0].device))
        for tensor in tensors:
            self._post(name, tensor.detach().contiguous())

    def complete(self, name: Hashable) -> None:
        """Wait until a message has been sent, and free its tensors."""
        for work, _ in self._in_flight.pop(name):
            work.wait()

    def _post(self, name: Hashable, tensor: Tensor) -> None:
        self._in_flight[name].append((dist.isend(tensor, self.peer, group=self.group), tensor))
        self.num_messages += 1


class Incoming:
    """The receiving end of a channel.

    A receive without known shapes, and all after it, are posted by `wait`, which reads its header first: messages match
    by order.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, shapes: ShapeBook, device: torch.device) -> None:
        self.peer, self.group, self.shapes, self._device = peer, group, shapes, device
        self._unposted: deque[tuple[Hashable, Hashable]] = deque()
        self._posted: dict[Hashable, tuple[MessageSpec, list[Tensor], list[dist.Work]]] = {}

    def post(self, name: Hashable, kind: Hashable) -> None:
        """Post the receive of a message, or defer it until the shapes of its kind are known."""
        self._unposted.append((name, kind))
        while self._unposted and (spec := self.shapes.find(self._unposted[0][1])) is not None:
            self._post(self._unposted.popleft()[0], spec)

    def wait(self, name: Hashable) -> tuple[Tensor, ...]:
        """Wait for a message and return its tensors [...]; tensors that need a gradient are leaves that require one."""
        while name not in self._posted:
            first, kind = self._unposted.popleft()
            if (spec := self.shapes.find(kind)) is None:
                header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
                dist.recv(header, self.peer, group=self.group)
                spec = _read_header(header)
                self.shapes.note(kind, spec)
            self._post(first, spec)
        spec, tensors, works = self._posted.pop(name)
        for work in works:
            work.wait()
        return tuple(tensor.requires_grad_(entry.requires_grad) for tensor, entry in zip(tensors, spec, strict=True))

    def _post(self, name: Hashable, spec: MessageSpec) -> None:
        tensors = [torch.empty(entry.shape, dtype=entry.dtype, device=self._device) for entry in spec]
        works = [dist.irecv(tensor, self.peer, group=self.group) for tensor in tensors]
        self._posted[name] = (spec, tensors, works)


def _header(spec: MessageSpec) -> Tensor:
    """Count of tensors, then dtype, requires_grad, dimensions and sizes of each."""
    numbers = [len(spec)]
    for entry in spec:
        numbers += [_DTYPES.index(entry.dtype), int(entry.requires_grad), len(entry.shape), *entry.shape]
    if len(numbers) > _HEADER_LENGTH:
        raise UserError(
            f"{len(spec)} tensors between two stages take a header of {len(numbers)} numbers, "
            f"and {_HEADER_LENGTH} fit: pass fewer tensors, or give the module an activation_spec"
        )
    return torch.tensor(numbers + [0] * (_HEADER_LENGTH - len(numbers)))


def _read_header(header: Tensor) -> MessageSpec:
    numbers = iter(header.tolist())
    spec = []
    for _ in range(next(numbers)):
        dtype, requires_grad, dimensions = next(numbers), next(numbers), next(numbers)
        spec.append(TensorSpec(tuple(next(numbers) for _ in range(dimensions)), _DTYPES[dtype], bool(requires_grad)))
    return tuple(spec)


def _describe(spec: MessageSpec) -> str:
    return " and ".join(f"{list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}" for entry in spec)


class _MessageKind(NamedTuple):
    """Messages of one shape: of a stage and a token slice; of one micro-batch, too, if shapes are dynamic."""

    phase: Hashable
    stage: int
    token_slice: int
    length: int
    micro_batch: int | None


class RankLinks:
    """Channels to the ranks of neighbouring stages, and the shapes of their messages.

    A message is named by the op that reads it: `1F0.3` waits for the activation of stage 0, `1BI0.3` for a gradient
    of stage 2.

    Args:
        topology: coordinates of all ranks. Every rank must make its links at the same time, with its groups.
        activation_rule: shapes of the activation of a number of tokens; None if they are read from headers.
        dynamic_shape: send a header with every message.
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
        rule = None if activation_rule is None or dynamic_shape else (lambda kind: activation_rule(kind.length))
        self._ends: dict[Channel, Any] = {}  # `Incoming` or `Outgoing`
        numbers = communicators(shape)
        # A group spans the pipeline, though a rank uses it with one other: few groups for many pairs are made faster
        # than one for each pair.
        pipelines = topology.get_axis_comm_lists("pipe")
        groups = self.groups = [
            own_group(pipelines, timeout, max_ctas=MESSAGE_CTAS) for _ in range(len(set(numbers.values())))
        ]
        """Communicators of the channels, by their numbers in the plan."""
        for channel, number in numbers.items():
            if own_rank not in channel[:2]:
                continue
            # One book for each end of a channel: both ends read the same messages, and no others.
            book, group = ShapeBook(rule if channel.result is OpKind.FORWARD else None), groups[number]
            other = channel.source + channel.target - own_rank
            peer = topology.get_rank(**coordinate._replace(pipe=other)._asdict())
            receives = channel.target == own_rank
            self._ends[channel] = Incoming(peer, group, book, device) if receives else Outgoing(peer, group, book)
        self._warm_up(device)

    def _warm_up(self, device: torch.device) -> None:
        """Use every channel once, so that no rank waits for a connection within a step (ADR 22)."""
        number = torch.zeros(1, device=device)
        for channel in warm_up_order(self._shape):
            if (end := self._ends.get(channel)) is not None:
                use = dist.recv if isinstance(end, Incoming) else dist.send
                use(number, end.peer, group=end.group)

    def begin(self, batch: LiveBatch) -> None:
        """Start a batch, with shapes of its own."""
        self._batch, self._shape = batch, batch.plan.shape
        if self._dynamic_shape:
            self.forget_shapes()

    def forget_shapes(self) -> None:
        """Allow other shapes in the next batch."""
        for end in self._ends.values():
            end.shapes.clear()

    def post(self, reader: Op) -> None:
        """Post the receive of the message that an op reads."""
        self._end(reader).post(reader, self._kind(reader))

    def wait(self, reader: Op) -> tuple[Tensor, ...]:
        """Wait for a message and return its tensors [...]. Activations that need a gradient are leaves."""
        tensors: tuple[Tensor, ...] = self._end(reader).wait(reader)
        if reader.kind is OpKind.FORWARD:
            self._note_gradients(reader, tensors)
        return tensors

    def send(self, reader: Op, tensors: tuple[Tensor, ...]) -> None:
        """Post a message of tensors [...] to the rank of an op."""
        if reader.kind is OpKind.FORWARD:
            self._note_gradients(reader, tensors)
        self._end(reader).send(reader, self._kind(reader), tensors)

    def complete(self, reader: Op) -> None:
        """Free a message after it has been sent."""
        self._end(reader).complete(reader)

    def peer(self, reader: Op) -> int:
        """Global rank at the other end of a message."""
        return self._end(reader).peer

    def _end(self, reader: Op) -> Any:
        return self._ends[channel_of(reader, self._shape)]

    def _note_gradients(self, reader: Op, activation: tuple[Tensor, ...]) -> None:
        """Note the shapes of the gradients of an activation, which are its own, at both ends."""
        needed = received(reader, self._shape)
        assert needed is not None, "an activation comes from another stage"
        answer = needed._replace(kind=OpKind.INPUT_GRADIENT)
        trained = [tensor for tensor in activation if tensor.requires_grad]
        spec = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype, False) for tensor in trained)
        self._end(answer).shapes.note(self._kind(answer), spec)

    def _kind(self, reader: Op) -> _MessageKind:
        micro_batch = reader.micro_batch if self._dynamic_shape else None
        plan = self._batch.plan
        # All that determines the shapes of activations, so that the shapes of one batch are never used for another.
        phase = plan.training, plan.rows, plan.token_slices
        length = self._batch.parts_of(reader.micro_batch).lengths[reader.token_slice]
        return _MessageKind(phase, reader.stage, reader.token_slice, length, micro_batch)
