"""A micro-batch, cut into what each token slice reads, and what token slices give put together again.

Data, labels and outputs are tensors, or tuples, lists and dicts of such. Anything else goes along as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.token_slice_parts import parts_of_all_ranks
from deepspeed_ext.runtime.sequence.sequence_ranks import SequenceParallelRanks

__all__ = ["SplitBatch", "TokenSliceBatch", "split_along_sequence"]


@dataclass(frozen=True, slots=True)
class TokenSliceBatch:
    """Data of one token slice of a micro-batch."""

    inputs: Any
    """Tensor or tuple of tensors for the first layer, or a dict of tensors that layers take by name."""
    labels: Any
    """Second argument of the loss function, or a dict of tensors that it takes by name."""
    loss_weight: float | Tensor
    """This token slice's share of the micro-batch's loss; the shares of a micro-batch sum to 1. Best a number, which
    need not be sent to a device."""


SplitBatch = Callable[[Any, TokenSlices], list[TokenSliceBatch]]
"""Cuts what the data iterator yields for one micro-batch, by the bounds of token slices or of one rank's parts of them.

Weights of the loss are shares of the whole micro-batch, whoever else has the rest."""


def split_along_sequence(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a micro-batch of tensors whose second dimension is the sequence into token slices.

    Tensors without a sequence dimension go to every token slice whole. The loss function returns the mean over the
    tokens it sees, so the weight of a token slice is its share of the tokens.

    Args:
        batch: `(inputs, labels)`, each a tensor [B, N, ...], or a tuple or dict of tensors.
        token_slices: lengths of the token slices.

    Raises:
        UserError: if the batch is no pair; or if the first tensor of the inputs or of the labels (any, of a dict) has
            another sequence length.
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        of_hugging_face = "; for dicts of Hugging Face's loaders give the module transformers_layers.split_batch"
        raise UserError(
            f"the data iterator yields a {type(batch).__name__}, and micro-batches are pairs: yield (inputs, labels), "
            f"each a tensor, or a tuple or dict of tensors{of_hugging_face if isinstance(batch, Mapping) else ''}"
        )
    inputs, labels = batch
    for name, tensors in (("inputs", inputs), ("labels", labels)):
        _check_length(name, tensors, token_slices)
    return [
        TokenSliceBatch(
            cut_along_sequence(inputs, token_slices.seq_length, start, end),
            cut_along_sequence(labels, token_slices.seq_length, start, end),
            (end - start) / token_slices.seq_length,
        )
        for start, end in token_slices.bounds()
    ]


def _check_length(name: str, tensors: Any, token_slices: TokenSlices) -> None:
    found = list(tensors_in(tensors))
    # Of a dict nobody knows which entry is the main one.
    asked = found if isinstance(tensors, Mapping) else found[:1]
    if asked and not any(_has_sequence(tensor, token_slices.seq_length) for tensor in asked):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in asked)
        raise UserError(
            f"{name} of shape {shapes} do not have the {token_slices.seq_length} tokens of the token "
            f"slices {token_slices} in dimension 1: feed sequences of that length, or change the token slices"
        )


def _has_sequence(tensor: Tensor, length: int) -> bool:
    return tensor.dim() >= 2 and tensor.shape[1] == length


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors [...] of a tuple or dict of such, in order."""
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for entry in tree.values():
            yield from tensors_in(entry)
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from tensors_in(entry)


def _map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call a function with each tensor, or what else there is, at one place of trees of the same form."""
    if isinstance(tree, Mapping):
        return {name: _map(function, entry, *(other[name] for other in others)) for name, entry in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_map(function, *entries) for entries in zip(tree, *others, strict=True))
    return function(tree, *others)


def cut_along_sequence(tensors: Any, seq_length: int, start: int, end: int) -> Any:
    """Some tokens of a tensor [B, N, ...], or of a tuple or dict of tensors; what has no sequence stays as it is.

    Args:
        seq_length: tokens N of a tensor that has a sequence.
        end: token behind the last one.
    """

    def cut(entry: Any) -> Any:
        return entry[:, start:end] if torch.is_tensor(entry) and _has_sequence(entry, seq_length) else entry

    return _map(cut, tensors)


def to_device(tensors: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple or dict of tensors, to a device. The host does not wait for the copies."""
    return _map(lambda entry: _moved(entry, device) if torch.is_tensor(entry) else entry, tensors)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == get_accelerator().device_name() != "cpu":
        # Copies from any other memory, and of tensors with gaps, make the host wait.
        tensor = tensor.contiguous()
        if not get_accelerator().is_pinned(tensor):
            tensor = get_accelerator().pin_memory(tensor)
    return tensor.to(device, non_blocking=True)


def parts_on_device(
    parts: Sequence[TokenSliceBatch], device: torch.device, seq_length: int, *, inputs: bool, labels: bool
) -> list[TokenSliceBatch]:
    """Move what the token slices of a micro-batch read. What they were cut from goes in one copy for all of them.

    Dicts stay where they are: their entries may be as wide as activations, and go to the device for one token slice at
    a time.

    Args:
        parts: data of each token slice.
        inputs: whether inputs are read here.
        labels: whether labels and weights of the loss are read here.
    """
    wholes: dict[int, tuple[Tensor, Tensor]] = {}

    def move(entry: Any) -> Any:
        if not torch.is_tensor(entry) or entry.device == device:
            return entry
        whole = entry._base
        if (
            whole is None
            or whole.shape != (*entry.shape[:1], seq_length, *entry.shape[2:])
            or not whole.is_contiguous()
        ):
            return _moved(entry, device)
        if id(whole) not in wholes:
            wholes[id(whole)] = whole, _moved(whole, device)
        start = (entry.storage_offset() - whole.storage_offset()) // whole.stride(1)
        return wholes[id(whole)][1][:, start : start + entry.shape[1]]

    def moved(tree: Any, wanted: bool) -> Any:
        return _map(move, tree) if wanted and not isinstance(tree, Mapping) else tree

    return [
        TokenSliceBatch(moved(part.inputs, inputs), moved(part.labels, labels), moved(part.loss_weight, labels))
        for part in parts
    ]


def detached(tensors: Any) -> Any:
    """The values of a tensor, or of a tuple or dict of such, without the graph that computed them."""
    return _map(lambda entry: entry.detach() if torch.is_tensor(entry) else entry, tensors)


def join_token_slices(
    parts: Sequence[Any],
    token_slices: TokenSlices,
    ranks: SequenceParallelRanks | None = None,
    *,
    read_by_all: bool = False,
) -> Any:
    """Put together what the token slices of a micro-batch gave: the opposite of the cut.

    Args:
        parts: data of each token slice, or of this rank's part of it: a tensor, or a tuple or dict of such.
        token_slices: lengths of the token slices.
        ranks: ranks that share the token slices, all of which must call this; None for one alone.
        read_by_all: whether these are data, of which each of the ranks has what has no sequence dimension.

    Returns:
        The same form. Tensors with a sequence dimension are concatenated along it; what all token slices have in
        common is given once; tensors [B, ...] or [] without one are stacked to [B, S, ...] or [S].
    """
    ranks = ranks or SequenceParallelRanks()
    lengths = parts_of_all_ranks(token_slices, ranks.size).lengths

    def join(*pieces: Any) -> Any:
        common = all(piece is pieces[0] for piece in pieces)
        if ranks.size > 1 and torch.is_tensor(pieces[0]):
            if not (common and read_by_all) or _has_sequence(pieces[0], lengths[0]):
                pieces, common = tuple(part for piece in pieces for part in ranks.gather(piece)), False
        if common:
            return pieces[0]
        if all(_has_sequence(piece, length) for piece, length in zip(pieces, lengths, strict=True)):
            return torch.cat(pieces, dim=1)
        return torch.stack(pieces, dim=min(1, pieces[0].dim()))

    return _map(join, *parts)


def join_micro_batches(wholes: Sequence[Any]) -> Any:
    """Put together what micro-batches gave: rows after rows, and scalars to one dimension."""

    def join(*wholes: Any) -> Any:
        if not torch.is_tensor(wholes[0]):
            return wholes[0] if all(whole == wholes[0] for whole in wholes) else list(wholes)
        return torch.cat(wholes) if wholes[0].dim() else torch.stack(wholes)

    return _map(join, *wholes)
