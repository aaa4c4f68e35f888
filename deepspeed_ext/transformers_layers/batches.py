"""Batches as Hugging Face's data loaders yield them, and the loss that their models compute of them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batches.batch import TokenSliceBatch, split_along_sequence
from deepspeed_ext.transformers_layers.tiled_logits import IGNORED, TiledLogits, summed_cross_entropy

ENTRIES = ("input_ids", "labels", "attention_mask")


def split_batch(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a micro-batch of a Hugging Face data loader into token slices.

    The label of a token is the token itself, and -100 does not count, as in transformers: labels are shifted here. A
    token slice weighs what makes the sum over token slices the mean over all labelled tokens of the micro-batch.

    Args:
        batch: a dict of `input_ids` [B, N], `labels` [B, N] and, if rows are padded on the right, `attention_mask`
            [B, N].
        token_slices: lengths of the token slices.

    Raises:
        UserError: if it is no such dict, is padded elsewhere, has labels on its padding, or none at all.
    """
    if not isinstance(batch, Mapping) or any(name not in batch for name in ENTRIES[:2]):
        found = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(
            f"the data loader yields {found}, and micro-batches of Hugging Face are dicts with 'input_ids' and "
            "'labels': take a collator that yields them, such as DataCollatorForLanguageModeling(mlm=False)"
        )
    others = [name for name, entry in batch.items() if name not in ENTRIES and entry is not None]
    if others:
        raise UserError(
            f"the data loader yields {others[0]!r}, which a model would take and token slices cannot: drop it in the "
            "collator"
        )
    tokens, labels = batch["input_ids"], _shifted(batch["labels"])
    if (mask := batch.get("attention_mask")) is not None:
        _check_padding(mask, labels)
    num_labelled = labelled_tokens(batch)
    if not num_labelled:
        raise UserError("a micro-batch has no label but -100, so its loss has no value: leave such rows out")
    return [
        TokenSliceBatch(part.inputs, part.labels, 1 / num_labelled)
        for part in split_along_sequence((tokens, labels), token_slices)
    ]


def labelled_tokens(batch: Mapping[str, Any]) -> int:
    """Number of tokens of a micro-batch that count in the loss, for the module's `loss_tokens`."""
    return int((_shifted(batch["labels"]) != IGNORED).sum())


def _shifted(labels: Tensor) -> Tensor:
    """Labels [B, N] of the token after each, as transformers shifts them; the last one has none."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def summed_loss(logits: Tensor | TiledLogits, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of labelled tokens, in fp32 at least; `split_batch` makes the mean of it.

    Args:
        logits: [B, N, V], or what they are computed from, some tokens at a time.
        labels: [B, N]; -100 does not count.
    """
    if isinstance(logits, TiledLogits):
        return logits.summed_loss(labels)
    return summed_cross_entropy(logits, labels)


def _check_padding(mask: Tensor, labels: Tensor) -> None:
    """Refuse padding that a token which counts would see: causal attention hides what is on the right alone.

    Args:
        mask: [B, N], 0 where a token is padding.
        labels: [B, N] of the token after each.
    """
    if mask.dim() != 2:
        raise UserError(f"attention_mask has the shape {tuple(mask.shape)}, and rows have one flag for each token")
    keeps = mask.bool()
    wrong = (keeps[:, 1:] & ~keeps[:, :-1]).any(dim=1)
    if wrong.any():
        raise UserError(
            f"attention_mask hides tokens before others in row {int(wrong.nonzero()[0])}, and causal attention would "
            "see them: pad on the right (tokenizer.padding_side = 'right')"
        )
    if ((labels != IGNORED) & ~keeps).any():
        raise UserError("labels of padding count in the loss: give them the label -100")
