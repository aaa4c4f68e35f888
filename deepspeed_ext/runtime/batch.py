"""A micro-batch, cut into what each token slice reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices


@dataclass(frozen=True, slots=True)
class TokenSliceBatch:
    """What one token slice of a micro-batch reads.

    Attributes:
        inputs: tensor or tuple of tensors for the first layer.
        labels: second argument of the loss function.
        loss_weight: this token slice's share of the micro-batch's loss; the shares of a micro-batch sum to 1.
    """

    inputs: Any
    labels: Any
    loss_weight: float | Tensor


SplitBatch = Callable[[Any, TokenSlices], list[TokenSliceBatch]]
"""Cuts what the data iterator yields for one micro-batch."""


def split_along_sequence(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Cut `(inputs, labels)`, each a tensor or a tuple of tensors, whose second dimension is the sequence.

    Tensors without a sequence dimension go to every token slice whole. The loss function returns the mean over the
    tokens it sees, so a token slice weighs as much as it has tokens.

    Raises:
        UserError: if the first tensor of the inputs or of the labels has another sequence length.
    """
    inputs, labels = batch
    for name, tensors in (("inputs", inputs), ("labels", labels)):
        first = tensors if torch.is_tensor(tensors) else tensors[0]
        if first.dim() < 2 or first.shape[1] != token_slices.seq_length:
            raise UserError(
                f"{name} of shape {tuple(first.shape)} do not have the {token_slices.seq_length} tokens of the token "
                f"slices {token_slices} in dimension 1: feed sequences of that length, or change the token slices"
            )
    return [
        TokenSliceBatch(
            _cut(inputs, token_slices.seq_length, start, end),
            _cut(labels, token_slices.seq_length, start, end),
            (end - start) / token_slices.seq_length,
        )
        for start, end in token_slices.bounds()
    ]


def _cut(tensors: Any, seq_length: int, start: int, end: int) -> Any:
    if torch.is_tensor(tensors):
        has_sequence = tensors.dim() >= 2 and tensors.shape[1] == seq_length
        return tensors[:, start:end] if has_sequence else tensors
    return tuple(_cut(tensor, seq_length, start, end) for tensor in tensors)


def to_device(tensors: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple of such, where a stage computes."""
    if torch.is_tensor(tensors):
        return tensors.to(device, non_blocking=True)
    return tuple(to_device(tensor, device) for tensor in tensors)
