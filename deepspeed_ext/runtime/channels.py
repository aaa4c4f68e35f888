"""Messages between neighbouring stages: posted in order, never waited for when posted.

A channel leads one way, from one stage to its neighbour, on a communicator of its own: NCCL runs the messages of a
communicator one after the other, so activations and gradients on one communicator would wait for each other.

A message is a tuple of tensors. Their shapes are usually known to both ends beforehand (`ShapeBook`), and then nothing
but the tensors is sent. Otherwise the first message of each kind is announced by a header of `_HEADER_LENGTH` numbers.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.plan.errors import UserError

_HEADER_LENGTH = 128
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class TensorSpec(NamedTuple):
    """Shape and type of a tensor, which its receiver must know."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """Describe a tensor of any shape [...]."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


MessageSpec = tuple[TensorSpec, ...]


class ShapeBook:
    """The shapes of messages by kind, as both ends of a channel know them.

    Args:
        rule: computes the shapes of a kind of message, where a model can say; None to learn them from headers.
    """

    def __init__(self, rule: Callable[[Hashable], MessageSpec] | None = None) -> None:
        self._rule = rule
        self._known: dict[Hashable, MessageSpec] = {}

    def find(self, kind: Hashable) -> MessageSpec | None:
        """Shapes of a kind of message, or None if they are not known yet."""
        if kind not in self._known and self._rule is not None:
            self._known[kind] = self._rule(kind)
        return self._known.get(kind)

    def learn(self, kind: Hashable, spec: MessageSpec) -> None:
        """Remember the shapes of a kind of message.

        Raises:
            UserError: if other shapes are known: the receiver could not tell, and would read garbage.
        """
        known = self.find(kind)
        if known is not None and known != spec:
            raise UserError(
                f"activations changed from {_describe(known)} to {_describe(spec)}: keep one shape, build the module "
                "with dynamic_shape=True, or call reset_activation_shape() on every rank before the change"
            )
        self._known[kind] = spec

    def clear(self) -> None:
        """Forget everything learned."""
        self._known.clear()


class Outgoing:
    """The sending end of a channel.

    Attributes:
        group: the communicator.
        num_messages: tensors posted so far, headers included.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, shapes: ShapeBook) -> None:
        self._peer, self.group, self._shapes = peer, group, shapes
        self._in_flight: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}
        self.num_messages = 0

    def send(self, name: Hashable, kind: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Post a message; its tensors stay alive until `complete(name)`.

        Args:
            kind: kind of the message; messages of one kind have the same shapes.
            tensors: tensors [...] of any shape.
        """
        spec = tuple(TensorSpec.of(tensor) for tensor in tensors)
        self._in_flight[name] = []
        if self._shapes.find(kind) is None:
            self._post(name, _header(spec).to(tensors[0].device))
        self._shapes.learn(kind, spec)
        for tensor in tensors:
            self._post(name, tensor.detach().contiguous())

    def over(self, name: Hashable) -> Callable[[], bool]:
        """Return a function that tells, from any thread and at any time, whether a message has left."""
        works = [work for work, _ in self._in_flight[name]]
        return lambda: all(work.is_completed() for work in works)

    def complete(self, name: Hashable) -> None:
        """Wait until a message has left, and let go of its tensors."""
        for work, _ in self._in_flight.pop(name):
            work.wait()

    def _post(self, name: Hashable, tensor: Tensor) -> None:
        self._in_flight[name].append((dist.isend(tensor, self._peer, group=self.group), tensor))
        self.num_messages += 1


class Incoming:
    """The receiving end of a channel.

    A receive whose shapes are not known yet, and all posted after it, wait for `wait`, which reads its header first:
    messages match by order, so none may be posted before its turn.

    Attributes:
        group: the communicator.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, shapes: ShapeBook, device: torch.device) -> None:
        self._peer, self.group, self._shapes, self._device = peer, group, shapes, device
        self._unposted: deque[tuple[Hashable, Hashable]] = deque()
        self._posted: dict[Hashable, tuple[MessageSpec, list[Tensor], list[dist.Work]]] = {}

    def post(self, name: Hashable, kind: Hashable) -> None:
        """Post the receive of a message, as soon as its shapes are known.

        Args:
            kind: kind of the message; messages of one kind have the same shapes.
        """
        self._unposted.append((name, kind))
        while self._unposted and (spec := self._shapes.find(self._unposted[0][1])) is not None:
            self._post(self._unposted.popleft()[0], spec)

    def over(self, name: Hashable) -> Callable[[], bool] | None:
        """Return a function that tells, from any thread and at any time, whether a message has come.

        Returns:
            The function; None if the receive is not posted yet.
        """
        if name not in self._posted:
            return None
        works = self._posted[name][2]
        return lambda: all(work.is_completed() for work in works)

    def wait(self, name: Hashable) -> tuple[Tensor, ...]:
        """Wait for a message and return its tensors [...]; those that need a gradient are leaves that require one."""
        while name not in self._posted:
            first, kind = self._unposted.popleft()
            if (spec := self._shapes.find(kind)) is None:
                header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
                dist.recv(header, self._peer, group=self.group)
                spec = _read_header(header)
                self._shapes.learn(kind, spec)
            self._post(first, spec)
        spec, tensors, works = self._posted.pop(name)
        for work in works:
            work.wait()
        return tuple(tensor.requires_grad_(entry.requires_grad) for tensor, entry in zip(tensors, spec, strict=True))

    def _post(self, name: Hashable, spec: MessageSpec) -> None:
        tensors = [torch.empty(entry.shape, dtype=entry.dtype, device=self._device) for entry in spec]
        works = [dist.irecv(tensor, self._peer, group=self.group) for tensor in tensors]
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
