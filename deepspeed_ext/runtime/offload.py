"""Copies of tensors to the memory of the host and back, on their own streams, and those of a token slice.

    compute    | forward | ...other ops...                  | backward
    to host               [copy]
    from host                               [copy]
               offload -->     drop         fetch -->       arrive

A stream runs its copies one after the other, beside the ops of the device. Nothing waits for the host: a copy starts
after the work that was queued before it was posted, and work that is queued after `drop` or `arrive` starts after the
copy's end. So the memory of dropped tensors can be used again at once, which torch cannot find out by itself.
On a CPU the same calls copy to a second buffer, at once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.runtime.clocks import OpClock, Stamps


class HostBuffers:
    """Buffers in the memory of the host, which are used again and again.

    Page-locked where the device is an accelerator: other memory it cannot read while its host does something else.
    Locking pages takes long, so buffers are kept: never more bytes (`held`) than were in use at once (`most_in_use`).
    """

    def __init__(self, device: torch.device) -> None:
        self._page_locked = device.type != "cpu"
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.held = self.in_use = self.most_in_use = 0

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer of the shape [...] and type of a tensor, with whatever is in it."""
        size = like.nbytes
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        buffer = self._free[size].pop() if self._free[size] else self._made(size)
        return buffer.view(like.dtype).view(like.shape)

    def give_back(self, buffer: Tensor) -> None:
        """Let others have a buffer [...] that was taken."""
        self.in_use -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer.reshape(-1).view(torch.uint8))

    def _made(self, size: int) -> Tensor:
        """A new buffer, in place of free ones of other sizes where there would be more than were ever in use."""
        for other, free in self._free.items():
            while free and self.held + size > self.most_in_use:
                free.pop()
                self.held -= other
        self.held += size
        buffer = torch.empty(size, dtype=torch.uint8)
        return get_accelerator().pin_memory(buffer) if self._page_locked else buffer


@dataclass(slots=True)
class HostCopy:
    """Some tensors on their way to the host and back."""

    needing_gradients: tuple[bool, ...]
    """Whether each of them is a leaf that requires a gradient."""
    on_host: list[Tensor]
    on_device: list[Tensor] = field(default_factory=list)
    """The tensors, until they are dropped, and again once they are fetched."""
    ended: Any = None
    """Event behind the copy that was posted last; None where there are no streams."""
    is_fetched: bool = False
    """Whether the copy back is posted."""
    stamps: list[Any] = field(default_factory=list)
    """If somebody measures, begin and end of the copy to the host, the drop, begin and end of the copy back."""


class HostCopies:
    """Copies between a device and its host, in both directions."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.buffers = HostBuffers(device)
        """Memory of the host."""
        self.clock: Stamps | None = None
        """Takes the stamps of copies; None where nobody measures."""
        accelerator = get_accelerator()
        has_streams = device.type != "cpu" and accelerator.Stream is not None
        self._to_host, self._from_host = (accelerator.Stream() if has_streams else None for _ in range(2))

    def offload(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Post a copy of tensors [...] to the host. They must not change any more; others may still read them."""
        given = [tensor.detach().contiguous() for tensor in tensors]
        copy = HostCopy(
            tuple(tensor.requires_grad for tensor in tensors), [self.buffers.take(each) for each in given], given
        )
        with self._posted_on(self._to_host, copy):
            for buffer, tensor in zip(copy.on_host, given, strict=True):
                buffer.copy_(tensor, non_blocking=True)
        return copy

    def drop(self, copy: HostCopy) -> None:
        """Free the device's tensors after the copy; the plan places this where the copy has ended."""
        self._wait(copy)
        self._stamp(copy)
        copy.on_device = []

    def fetch(self, copy: HostCopy) -> None:
        """Post the copy back."""
        # Made for the stream of the ops, after which the copy starts: earlier contents have been read by then.
        copy.on_device = [torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in copy.on_host]
        with self._posted_on(self._from_host, copy):
            for tensor, buffer in zip(copy.on_device, copy.on_host, strict=True):
                tensor.copy_(buffer, non_blocking=True)
        copy.is_fetched = True

    def arrive(self, copy: HostCopy) -> tuple[Tensor, ...]:
        """The tensors [...] that were fetched, for ops that the device is told of from now on; the copy ends."""
        self._wait(copy)
        self._give_back(copy)
        return tuple(
            tensor.requires_grad_(needs) for tensor, needs in zip(copy.on_device, copy.needing_gradients, strict=True)
        )

    def abandon(self, copy: HostCopy) -> None:
        """Let go of a copy, whatever state it is in."""
        self._wait(copy)
        self._give_back(copy)
        copy.on_device = []

    @contextmanager
    def _posted_on(self, stream: Any, copy: HostCopy) -> Iterator[None]:
        """Around copies: they go to a stream, behind what the device was told so far."""
        if stream is None:
            self._stamp(copy)
            yield
            self._stamp(copy)
            return
        accelerator = get_accelerator()
        stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(stream):
            self._stamp(copy)
            yield
            self._stamp(copy)
        copy.ended = accelerator.Event()
        copy.ended.record(stream)

    def _stamp(self, copy: HostCopy) -> None:
        if self.clock is not None:
            copy.stamps.append(self.clock.now())

    def _wait(self, copy: HostCopy) -> None:
        if copy.ended is not None:
            get_accelerator().current_stream().wait_event(copy.ended)

    def _give_back(self, copy: HostCopy) -> None:
        # The next copy to the host starts after the ops that waited for this one.
        for buffer in copy.on_host:
            self.buffers.give_back(buffer)
        copy.on_host = []


class TokenSliceCopies:
    """The host copies of one rank, by what they are of."""

    def __init__(self, settings: HostCopySettings, device: torch.device) -> None:
        self._settings = settings
        self._copies = HostCopies(device)
        self._clock: OpClock | None = None
        self._under_way: dict[tuple[Content, int, int, int], HostCopy] = {}

    @property
    def most_host_bytes(self) -> int:
        """Most bytes of the host that were in use at once."""
        return self._copies.buffers.most_in_use

    @contextmanager
    def measured_by(self, clock: OpClock) -> Iterator[None]:
        """Let a clock stamp the copies of the batches that run inside."""
        self._clock, self._copies.clock = clock, clock.stamps
        try:
            yield
        finally:
            self._clock = self._copies.clock = None

    def begin(self, settings: HostCopySettings) -> None:
        """Expect a batch."""
        self._settings = settings

    def offload(self, content: Content, op: Op, tensors: Sequence[Tensor]) -> None:
        """Post a copy of tensors [...] to the host."""
        self._under_way[content, *op[1:]] = self._copies.offload(tensors)

    def drop(self, content: Content, op: Op) -> None:
        """Let go of the device's tensors; others must not hold them."""
        self._copies.drop(self._under_way[content, *op[1:]])

    def fetch(self, content: Content, op: Op) -> None:
        """Post the copy back."""
        self._copies.fetch(self._under_way[content, *op[1:]])

    def arrivals(self, op: Op) -> Iterator[tuple[Content, int, tuple[Tensor, ...]]]:
        """What a backward reads that was fetched for it: what it is, of which token slice, and the tensors [...]."""
        for content, stage, micro_batch, token_slice in list(self._under_way):
            if (stage, micro_batch) != (op.stage, op.micro_batch):
                continue
            if self._settings.last_reader(content, stage, token_slice) >= op.token_slice:
                copy = self._under_way.pop((content, stage, micro_batch, token_slice))
                assert copy.is_fetched, f"{content} of token slice {token_slice} are read, and were not fetched"
                if self._clock is not None:
                    self._clock.copied((content, stage, micro_batch, token_slice), copy.stamps)
                yield content, token_slice, self._copies.arrive(copy)

    def finish(self) -> None:
        """Keep nothing of a batch, wherever it ended."""
        while self._under_way:
            self._copies.abandon(self._under_way.popitem()[1])
