"""Micro-batches for one data-parallel rank, in an order that only the samples consumed decide."""

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_terapipe.data.datasets import SampleDataset
from megatron_terapipe.data.workers import map_ahead


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A micro-batch of one data-parallel rank."""

    tokens: Tensor
    """Input ids, int64 [micro_batch, seq]."""
    labels: Tensor
    """The id after each input, int64 [micro_batch, seq]."""
    loss_mask: Tensor
    """1 where the prediction counts, else 0, float32 [micro_batch, seq]."""
    document_starts: tuple[tuple[int, ...], ...] = ()
    """Per row the positions in [0, seq) at which its documents begin, ascending, the first 0. Left out, each row is one
    document."""

    def __post_init__(self) -> None:
        if not self.document_starts:
            object.__setattr__(self, "document_starts", ((0,),) * len(self.tokens))

    @classmethod
    def from_samples(
        cls, samples: Tensor, *, separating_eod: int | None = None, masked_eod: int | None = None
    ) -> "MicroBatch":
        """Cut samples into inputs and labels.

        Args:
            samples: ids, int64 [micro_batch, seq + 1].
            separating_eod: id that ends a document; None: each row is one document.
            masked_eod: id that ends a document, where the prediction after it, the first token of an unrelated
                document, does not count; None counts every prediction.
        """
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
        if masked_eod is not None:
            loss_mask[tokens == masked_eod] = 0.0
        starts: tuple[tuple[int, ...], ...] = ()
        if separating_eod is not None:  # An end at the last position begins no document.
            ends = ((row[:-1] == separating_eod).nonzero().flatten().tolist() for row in tokens)
            starts = tuple((0, *(end + 1 for end in of_row)) for of_row in ends)
        return cls(tokens=tokens, labels=labels, loss_mask=loss_mask, document_starts=starts)

    @classmethod
    def from_parts(cls, samples: Sequence[Mapping[str, Any]]) -> "MicroBatch":
        """Join samples of `tokens`, `labels`, `loss_mask` and perhaps `position_ids`.

        Each is an array [seq]. Documents begin where a position is 0.
        """
        tokens, labels, mask = (
            torch.from_numpy(np.stack([sample[name] for sample in samples]))
            for name in ("tokens", "labels", "loss_mask")
        )
        starts = tuple(
            tuple(np.flatnonzero(sample["position_ids"] == 0).tolist()) if "position_ids" in sample else (0,)
            for sample in samples
        )
        return cls(tokens=tokens, labels=labels, loss_mask=mask, document_starts=starts)

    def pin_memory(self) -> "MicroBatch":
        """Return the batch in page-locked memory, from which an accelerator copies while it computes."""
        return MicroBatch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
            document_starts=self.document_starts,
        )


_BATCHES_AHEAD_PER_WORKER, _TOKENS_AHEAD = 4, 1 << 23
"""Micro-batches that a thread prepares ahead: as many, and no more tokens together than that, at 20 bytes each."""


def load_micro_batches(
    dataset: SampleDataset,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed_samples: int = 0,
    num_workers: int = 1,
    *,
    separating_eod: int | None = None,
    masked_eod: int | None = None,
    pin_memory: bool = False,
    seq_length: int = 1,
) -> Generator[MicroBatch]:
    """Yield endless micro-batches of one data-parallel rank, prepared in the background; close it at the end.

    After `consumed_samples`, the dataset's samples go to micro-batch 0 of rank 0, of rank 1, ..., then to micro-batch 1
    of rank 0, and so on. So a global batch is a run of consecutive samples, the same under every data-parallel size,
    and a resumed run continues with the next sample. After the last sample the first follows. An exception while a
    batch is prepared is raised in that batch's place, and ends the iteration.

    Args:
        consumed_samples: samples that all ranks together have taken before, over all runs.
        num_workers: threads that prepare batches ahead; 0 prepares each in `next`.
        seq_length: tokens of a sample; of long ones fewer are prepared ahead.
    """
    assert 0 <= data_parallel_rank < data_parallel_size and len(dataset), "checked by the configuration"

    def load(start: int) -> MicroBatch:
        samples = [dataset[number % len(dataset)] for number in range(start, start + micro_batch_size)]
        if isinstance(samples[0], Mapping):
            batch = MicroBatch.from_parts(samples)
        else:
            ids = torch.from_numpy(np.stack(samples))
            batch = MicroBatch.from_samples(ids, separating_eod=separating_eod, masked_eod=masked_eod)
        return batch.pin_memory() if pin_memory else batch

    starts = count(consumed_samples + data_parallel_rank * micro_batch_size, micro_batch_size * data_parallel_size)
    if not num_workers:
        yield from map(load, starts)
    fit = _TOKENS_AHEAD // (micro_batch_size * seq_length)
    ahead = min(max(1, fit), _BATCHES_AHEAD_PER_WORKER)
    with ThreadPoolExecutor(num_workers, "loader") as executor:
        yield from map_ahead(executor, load, starts, ahead * num_workers)
