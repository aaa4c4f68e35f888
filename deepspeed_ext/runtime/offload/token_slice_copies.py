"""Host copies of what the forward of a token slice leaves on a stage: its input, and keys and values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.runtime.ledger.op_clock import OpClock
from deepspeed_ext.runtime.offload.host_copies import HostCopies, HostCopy


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
        """Post a copy to the host.

        Args:
            tensors: tensors [...].
        """
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
