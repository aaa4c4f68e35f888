"""Cuts a micro-batch of the data loader into what each token slice reads."""

from collections.abc import Callable
from dataclasses import replace

import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batches.batch import TokenSliceBatch
from deepspeed_ext.runtime.sequence.documents import Documents
from megatron_terapipe.config import DataConfig
from megatron_terapipe.data.samples.batch import Batch


def split_batch(batch: Batch, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split tokens, labels and loss mask along the sequence.

    The loss of a token slice is the mean over its own loss-bearing tokens. Its weight is its share of the loss-bearing
    tokens of the micro-batch, so that the weighted sum is the mean over all of them, those of other sequence-parallel
    ranks included.

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


def split_batch_with_labels(batch: Batch, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a batch as `split_batch` does, with labels as an entry of the data, too: vocabulary stages read them.

    Args:
        token_slices: lengths of the token slices.
    """
    parts = split_batch(batch, token_slices)
    return [replace(part, inputs={"tokens": part.inputs, "labels": part.labels[0]}) for part in parts]


def loss_tokens(batch: Batch) -> float:
    """Return the number of tokens of a micro-batch that bear loss."""
    return batch.loss_mask.sum(dtype=torch.float64).item()


def documents_reader(data: DataConfig) -> Callable[[Batch], Documents] | None:
    """Return the function that finds where the documents of a micro-batch begin; None if none are separated."""
    if not data.separates_documents:
        return None

    def read(batch: Batch) -> Documents:
        return Documents(
            batch.document_starts, attend_apart=data.reset_attention_mask, positions_restart=data.reset_position_ids
        )

    return read
