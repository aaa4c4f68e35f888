"""The micro-batches that a rank reads, and their token slices."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch
from megatron_terapipe.config import DataConfig
from megatron_terapipe.data.datasets import SampleDataset
from megatron_terapipe.data.loader import MicroBatch, MicroBatchLoader
from megatron_terapipe.errors import DataError
from megatron_terapipe.training.run import Run


def split_batch(batch: MicroBatch, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split tokens, labels and loss mask along the sequence.

    The loss of a token slice is the mean over its own loss-bearing tokens. Its weight is its share of the loss-bearing
    tokens of the micro-batch, so that the weighted sum is the mean over all of them, on all sequence-parallel
    ranks.

    Args:
        token_slices: lengths of the token slices, or of this rank's parts of them.
    """
    # As numbers: the batch is still on the host, and the loss is on a device that would have to be sent tensors.
    counts = [batch.loss_mask[:, start:end].sum(dtype=torch.float64).item() for start, end in token_slices.bounds()]
    loss_bearing = max(loss_tokens(batch), 1.0)
    return [
        TokenSliceBatch(
            inputs=batch.tokens[:, start:end],
            labels=(batch.labels[:, start:end], batch.loss_mask[:, start:end]),
            loss_weight=count / loss_bearing,
        )
        for count, (start, end) in zip(counts, token_slices.bounds(), strict=True)
    ]


def split_batch_with_labels(batch: MicroBatch, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a batch as `split_batch` does, with labels as an entry of the data, too: vocabulary stages read them."""
    parts = split_batch(batch, token_slices)
    return [replace(part, inputs={"tokens": part.inputs, "labels": part.labels[0]}) for part in parts]


def loss_tokens(batch: MicroBatch) -> float:
    """Return the number of tokens of a micro-batch in the loss mask."""
    return batch.loss_mask.sum(dtype=torch.float64).item()


def documents_reader(data: DataConfig, *, numbered: bool = False) -> Callable[[MicroBatch], Documents] | None:
    """Return the function that finds where documents of a micro-batch begin, `numbered` if layers read their numbers.

    None if no documents are separated.
    """
    if not data.separates_documents:
        return None
    apart, restart = data.reset_attention_mask, data.reset_position_ids
    return lambda batch: Documents(
        batch.document_starts, attend_apart=apart, positions_restart=restart, numbered=numbered
    )


@contextmanager
def micro_batches(
    run: Run,
    engine: TokenSlicePipelineEngine,
    dataset: SampleDataset,
    consumed_samples: int,
    micro_batch_size: int | None = None,
) -> Iterator[Iterator[Any]]:
    """Read a dataset from `consumed_samples` on, if this rank's stage reads any.

    Between the first and the last stage nothing is read, unless attention separates documents.

    Args:
        micro_batch_size: rows of a micro-batch; None = as in training.
    """
    data = run.config.data
    if not engine.reads_data:
        yield iter(())
        return
    eod = run.tokenizer.eod
    with MicroBatchLoader(
        dataset,
        micro_batch_size or run.config.batch.micro_batch_size,
        run.layout.coordinate(run.launch.rank).data,
        run.layout.data_parallel_size,
        consumed_samples,
        num_workers=data.num_workers,
        separating_eod=eod if data.separates_documents else None,
        masked_eod=eod if data.eod_mask_loss else None,
        pin_memory=get_accelerator().device_name() != "cpu",
        seq_length=run.config.model.seq_length,
    ) as loader:
        yield _named(loader, run.launch.rank)


def _named(loader: MicroBatchLoader, rank: int) -> Iterator[Any]:
    """Yield the micro-batches; an error has the rank and host, because others may read other files."""
    try:
        yield from loader
    except DataError as error:
        raise DataError(f"rank {rank} (host {socket.gethostname()}): {error}") from None
