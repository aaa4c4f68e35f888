"""Observers of the ops and the phases of a step: clocks, and ranges with names for profilers."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER

from deepspeed_ext.plan.ops import Op, OpKind

__all__ = ["Observer", "ProfilerRanges"]

OPS, SUMS, REDUCTIONS, UPDATE = "forward-backward", "shared-grads-sync", "all-grads-sync", "optimizer"
PHASES = (OPS, SUMS, REDUCTIONS, UPDATE)
"""Phases of a step, one after the other: ops and transfers; sums of gradients over the ranks of one replica; what is
left of the sums over replicas; norm, clipping and update."""


class Observer(Protocol):
    """Somebody who surrounds what an engine does."""

    def begin(self) -> None:
        """A batch begins."""

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Surround the computing of an op."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surround a phase of a step after the ops."""


class Observers:
    """Several observers as one."""

    def __init__(self, members: Iterable[Observer] = ()) -> None:
        self._members = list(members)

    @contextmanager
    def joined_by(self, observer: Observer) -> Iterator[None]:
        """Let another one observe the batches that run inside."""
        self._members.append(observer)
        try:
            yield
        finally:
            self._members.remove(observer)

    def begin(self) -> None:
        """A batch begins."""
        for member in self._members:
            member.begin()

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Surround the computing of an op."""
        return self._around(member.op(op) for member in self._members)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surround a phase of a step after the ops."""
        return self._around(member.phase(name) for member in self._members)

    @contextmanager
    def _around(self, surroundings: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as entered:
            for each in surroundings:
                entered.enter_context(each)
            yield


class BackwardTimer:
    """Runs DeepSpeed's timer of backwards, of its setting `wall_clock_breakdown`. Its hooks time the forwards."""

    def __init__(self, engine: Any) -> None:
        self._timer = engine.timers(BACKWARD_MICRO_TIMER)

    def begin(self) -> None:
        """The timer goes on."""

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Time an op that is no forward."""
        if op.kind is OpKind.FORWARD:
            yield
            return
        self._timer.start()
        yield
        self._timer.stop()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Let a phase be."""
        return nullcontext()


class ProfilerRanges:
    """Gives ops and phases names, in torch's profiler and on an accelerator's timeline (NVTX on CUDA)."""

    def begin(self) -> None:
        """A batch has no name."""

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Name an op: `2F0.3`."""
        return _named(str(op))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a phase."""
        return _named(name)


@contextmanager
def _named(name: str) -> Iterator[None]:
    accelerator = get_accelerator()
    accelerator.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        accelerator.range_pop()
