"""Lengths of token slices with which an accelerator has run, to find the batches that may load kernels."""

from collections import defaultdict
from collections.abc import Hashable, Iterator

from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.live_batch import LiveBatch

LENGTHS_OF_A_RANGE = 8
"""Lengths of a range after which its others count as run: compilers generalise after two."""


class RunLengths:
    """The lengths for which an accelerator has run all ops of a batch, so that it has loaded their kernels (ADR 22).

    Which lengths load one depends on compilers and libraries, so each new length counts, the same on all ranks.
    """

    def __init__(self) -> None:
        self.settles = not get_accelerator().is_synchronized_device()
        """Whether no message travels under the ops of a batch with new lengths."""
        self._run: defaultdict[Hashable, set[int]] = defaultdict(set)

    def are_new(self, batch: LiveBatch) -> bool:
        """Whether a batch may load kernels."""
        found = ((tokens, self._run[key]) for key, tokens in self._lengths(batch))
        return any(tokens not in run and len(run) < LENGTHS_OF_A_RANGE for tokens, run in found)

    def add(self, batch: LiveBatch) -> None:
        """Add the lengths of a batch that has run."""
        for key, tokens in self._lengths(batch):
            if len(self._run[key]) < LENGTHS_OF_A_RANGE:
                self._run[key].add(tokens)

    def _lengths(self, batch: LiveBatch) -> Iterator[tuple[Hashable, int]]:
        """Lengths of token slices and of their keys, each with its range: up to a power of 2, whole tiles or not."""
        for content, tokens in batch.lengths() if self.settles else ():
            yield (batch.plan.extent, content, tokens.bit_length(), tokens % 128 == 0), tokens
