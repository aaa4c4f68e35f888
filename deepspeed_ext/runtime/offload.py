"""Copies of tensors to the memory of the host and back, on streams of their own.

    compute    | forward | ...other ops...                  | backward
    to host               [copy]
    from host                               [copy]
               offload -->     drop         fetch -->       arrive

A stream runs its copies one after the other, in parallel with the ops of the device. The host never waits: a copy
starts after the work that was queued before it was posted, and work that is queued after `drop` or `arrive` starts
after the end of the copy. So the memory of dropped tensors can be reused at once, which torch cannot find out by
itself. On a CPU the same calls copy to a second buffer, at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings, TimedCopy
from deepspeed_ext.plan.programs.program import FETCHES, OFFLOADS, Content, Instruction, content_of
from deepspeed_ext.runtime.clocks import OpClock
from deepspeed_ext.runtime.live_batch import Buffer
from deepspeed_ext.runtime.state.sequence_state import SequenceState

Name = tuple[Content, int, int, int]
"""Content, stage, micro-batch and token slice of a copy."""


PAGE_BYTES = 1 << 20
"""Bytes of a page of host memory."""

SLAB_BYTES = 1 << 26
"""Bytes that are allocated at a time. Torch rounds page-locked memory up to a power of two, and keeps freed memory; a
process has at most some 65,000 mappings."""


class HostPages:
    """Memory of the host, in pages of one size, each of which serves any tensor.

    Page-locked where the device is an accelerator, which cannot read other memory while its host is busy. Locking is
    slow and may wait for the device, so pages are kept: as many as were in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._page_locked = device.type != "cpu"
        self._free: list[Tensor] = []
        self.held = self.in_use = self.most_in_use = 0
        """Bytes: of all pages, of pages in use, and the most that were in use at once."""

    def take(self, size: int) -> list[Tensor]:
        """Return pages [PAGE_BYTES] for a number of bytes, with any content."""
        number = -(-size // PAGE_BYTES)
        while len(self._free) < number:
            slab = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=self._page_locked)
            self._free += slab.split(PAGE_BYTES)
            self.held += slab.nbytes
        self.in_use += number * PAGE_BYTES
        self.most_in_use = max(self.most_in_use, self.in_use)
        return [self._free.pop() for _ in range(number)]

    def give_back(self, pages: Sequence[Tensor]) -> None:
        """Return pages that were taken."""
        self.in_use -= len(pages) * PAGE_BYTES
        self._free += pages


def _parts(tensors: Iterable[Tensor], pages: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equally long parts, in bytes: of contiguous tensors [...], and of pages that have them in a row."""
    place = 0
    for tensor in tensors:
        rest = tensor.view(-1).view(torch.uint8)
        while rest.numel():
            page, start = divmod(place, PAGE_BYTES)
            part = pages[page][start : start + rest.numel()]
            yield rest[: part.numel()], part
            rest, place = rest[part.numel() :], place + part.numel()


@dataclass(slots=True)
class _HostCopy:
    """Tensors that are copied to the host and back."""

    forms: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    """Shape and type of each of them, and whether it is a leaf that requires a gradient."""
    pages: list[Tensor]
    """Pages of the host."""
    on_device: list[Tensor] = field(default_factory=list)
    """The tensors, until they are dropped, and again once they are fetched."""
    ended: Any = None
    """Event after the copy that was posted last; None where there are no streams."""
    is_fetched: bool = False
    """Whether the copy back is posted."""
    stamps: list[Any] = field(default_factory=list)
    """With a clock, start and end of the copy to the host, the drop, start and end of the copy back."""


class HostCopies:
    """The host copies of one rank. Without settings they cannot `begin` a batch."""

    def __init__(self, device: torch.device, settings: HostCopySettings | None = None) -> None:
        self._device, self._settings, self._fitting = device, settings, settings
        self.pages = HostPages(device)
        """Memory of the host."""
        self._clock: OpClock | None = None
        self._measured: list[tuple[Name, list[Any]]] = []
        self._under_way: dict[Name, _HostCopy] = {}
        accelerator = get_accelerator()
        has_streams = device.type != "cpu" and accelerator.Stream is not None
        self._to_host, self._from_host = (accelerator.Stream() if has_streams else None for _ in range(2))

    @contextmanager
    def measured_by(self, clock: OpClock) -> Iterator[list[TimedCopy]]:
        """Stamp the copies of the batches run inside; on leaving, the list yielded holds them by their start."""
        timed: list[TimedCopy] = []
        self._clock, self._measured = clock, []
        try:
            yield timed
        finally:
            self._clock = None
        # Stamps of two streams may differ by their resolution.
        timed += (TimedCopy(*name, *accumulate(clock.since_start(*stamps), max)) for name, stamps in self._measured)
        timed.sort(key=lambda copy: copy.offload_start)

    def begin(self, shape: PipelineShape) -> None:
        """Start a batch of a shape."""
        self._fitting = self._settings.fitting(shape)

    def offload(self, name: Name, tensors: Sequence[Tensor]) -> None:
        """Post a copy of tensors [...] to the host. They must not change any more; ops may still read them."""
        given = [tensor.detach().contiguous() for tensor in tensors]
        pages = self.pages.take(sum(each.nbytes for each in given))
        forms = tuple((each.shape, each.dtype, each.requires_grad) for each in tensors)
        copy = self._under_way[name] = _HostCopy(forms, pages, given)
        with self._posted_on(self._to_host, copy):
            for part, on_host in _parts(given, pages):
                on_host.copy_(part, non_blocking=True)

    def drop(self, name: Name) -> None:
        """Free the tensors of the device after the copy, if nothing else refers to them."""
        copy = self._under_way[name]
        self._wait(copy)
        self._stamp(copy)
        copy.on_device = []

    def fetch(self, name: Name) -> None:
        """Post the copy back."""
        copy = self._under_way[name]
        # Made for the stream of the ops, after which the copy starts: earlier contents have been read by then.
        copy.on_device = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype, _ in copy.forms]
        with self._posted_on(self._from_host, copy):
            for part, on_host in _parts(copy.on_device, copy.pages):
                part.copy_(on_host, non_blocking=True)
        copy.is_fetched = True

    def arrive(self, name: Name) -> tuple[Tensor, ...]:
        """Return the fetched tensors [...], for ops that are queued from now on; the copy ends."""
        copy = self._end(name)
        assert copy.is_fetched, f"{name} is read, and was not fetched"
        # Fewer stamps if the copy began before the clock.
        if len(copy.stamps) == 5:
            self._measured.append((name, copy.stamps))
        return tuple(
            tensor.requires_grad_(needs) for tensor, (*_, needs) in zip(copy.on_device, copy.forms, strict=True)
        )

    def execute(self, step: Instruction, held: Buffer, state: SequenceState) -> None:
        """Run an instruction, given the buffer of its token slice and the state of its micro-batch on the stage."""
        content = content_of(step.kind)
        name, of_input = (content, *step.op[1:]), content is Content.INPUT
        if step.kind in OFFLOADS:
            self.offload(name, held.inputs if of_input else state.keys_of(step.token_slice))
        elif step.kind in FETCHES:
            self.fetch(name)
        else:
            if of_input:
                held.inputs = ()
            else:
                state.drop_keys_of(step.token_slice)
            self.drop(name)

    def put_back(self, op: Op, held: Buffer, state: SequenceState) -> None:
        """Put back the tensors that were fetched for a backward, as above."""
        for name in list(self._under_way):
            content, stage, micro_batch, token_slice = name
            is_of_op = (stage, micro_batch) == (op.stage, op.micro_batch)
            if is_of_op and self._fitting.last_reader(content, stage, token_slice) >= op.token_slice:
                tensors = self.arrive(name)
                if content is Content.INPUT:
                    held.inputs = tensors
                else:
                    state.put_back_keys_of(token_slice, tensors)

    def finish(self) -> None:
        """End all copies, in any state."""
        for name in list(self._under_way):
            self._end(name)

    def _end(self, name: Name) -> _HostCopy:
        copy = self._under_way.pop(name)
        self._wait(copy)
        # The next copy to the host starts after the ops that waited for this one.
        self.pages.give_back(copy.pages)
        return copy

    @contextmanager
    def _posted_on(self, stream: Any, copy: _HostCopy) -> Iterator[None]:
        """Around copies: they are queued on a stream, after the work that was queued before."""
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

    def _stamp(self, copy: _HostCopy) -> None:
        if self._clock is not None:
            copy.stamps.append(self._clock.stamps.now())

    def _wait(self, copy: _HostCopy) -> None:
        if copy.ended is not None:
            get_accelerator().current_stream().wait_event(copy.ended)
