"""The micro-batches that a rank reads, and their token slices."""

import socket
from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch
from megatron_terapipe.config import DataConfig, ModelConfig
from megatron_terapipe.data.datasets import SampleDataset
from megatron_terapipe.data.loader import MicroBatch, load_micro_batches
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
    return list(map(_with_labels, split_batch(batch, token_slices)))


def _with_labels(part: TokenSliceBatch) -> TokenSliceBatch:
    return replace(part, inputs={"tokens": part.inputs, "labels": part.labels[0]})


def split_for_predictions(model: ModelConfig) -> Callable[[MicroBatch, TokenSlices], list[TokenSliceBatch]]:
    """Return the function that splits a batch with the targets of each depth, which are an entry of the data, too.

    Its loss is the sum of weighed losses, in which every depth has its mean over the micro-batch.
    """
    factor = model.mtp_loss_factor

    def split(batch: MicroBatch, token_slices: TokenSlices) -> list[TokenSliceBatch]:
        labels, mask = further_labels(batch, model.mtp_num_layers)
        weights = (mask / mask.sum((0, 1), dtype=torch.float64).clamp(min=1)).to(mask.dtype)
        weights[..., 1:] *= factor
        return [
            _with_labels(TokenSliceBatch(batch.tokens[:, start:end], (labels[:, start:end], weights[:, start:end]), 1))
            for start, end in token_slices.bounds()
        ]

    return split


def further_labels(batch: MicroBatch, num_depths: int) -> tuple[Tensor, Tensor]:
    """Return the token that each depth predicts, and 1 where the prediction counts: each [B, L, 1 + depths].

    Depth k predicts of token t the token that depth 0 predicts of t + k. It counts if that counts and both are in one
    document, as in Megatron. Tokens beyond the row are unknown; there 0 is read, which no earlier token attends to.
    """
    begins = torch.zeros_like(batch.tokens)
    for row, starts in enumerate(batch.document_starts):
        begins[row, list(starts)] = 1
    document = begins.cumsum(1)
    labels, masks = [batch.labels], [batch.loss_mask]
    for depth in range(1, num_depths + 1):
        together = document[:, depth:] == document[:, :-depth]
        labels.append(F.pad(batch.labels[:, depth:], (0, depth)))
        masks.append(F.pad(batch.loss_mask[:, depth:] * together, (0, depth)))
    return torch.stack(labels, -1), torch.stack(masks, -1)


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


def micro_batches(
    run: Run,
    engine: TokenSlicePipelineEngine,
    dataset: SampleDataset,
    consumed_samples: int,
    micro_batch_size: int | None = None,
) -> Generator[MicroBatch]:
    """Read a dataset from `consumed_samples` on, if this rank's stage reads any; close it at the end.

    Between the first and the last stage nothing is read, unless attention separates documents.

    Args:
        micro_batch_size: rows of a micro-batch; None = as in training.

    Raises:
        DataError: with the rank and its host, because others may read other files.
    """
    if not engine.reads_data:
        return
    data, eod, rank = run.config.data, run.tokenizer.eod, run.launch.rank
    try:
        yield from load_micro_batches(
            dataset,
            micro_batch_size or run.config.batch.micro_batch_size,
            run.layout.coordinate(rank).data,
            run.layout.data_parallel_size,
            consumed_samples,
            num_workers=data.num_workers,
            separating_eod=eod if data.separates_documents else None,
            masked_eod=eod if data.eod_mask_loss else None,
            pin_memory=get_accelerator().device_name() != "cpu",
            seq_length=run.config.model.seq_length,
        )
    except DataError as error:
        raise DataError(f"rank {rank} (host {socket.gethostname()}): {error}") from None
