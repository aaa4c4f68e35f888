"""Micro-batches: read, cut into token slices, copied to the device, and joined again.

Data, labels and outputs are tensors, or tuples, lists and dicts of such. Anything else is passed on unchanged.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_all_ranks
from deepspeed_ext.runtime.topology import SequenceParallelRanks

__all__ = ["SplitBatch", "TokenSliceBatch", "split_along_sequence"]


@dataclass(frozen=True, slots=True)
class TokenSliceBatch:
    """Data of one token slice of a micro-batch."""

    inputs: Any
    """Tensor or tuple of tensors for the first layer, or a dict of tensors that layers take by name."""
    labels: Any
    """Second argument of the loss function, or a dict of tensors that it takes by name."""
    loss_weight: float | Tensor
    """This token slice's share of the micro-batch's loss; the shares of a micro-batch sum to 1. Best a number, which is
    not copied to a device."""


SplitBatch = Callable[[Any, TokenSlices], list[TokenSliceBatch]]
"""Cuts one micro-batch of the data iterator, by the bounds of token slices or of one rank's parts of them.

Weights of the loss are shares of the whole micro-batch, also if other ranks have the rest."""


def split_along_sequence(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a micro-batch of tensors whose second dimension is the sequence into token slices.

    Tensors without a sequence dimension go to every token slice whole. The loss function returns the mean over its
    tokens, so the weight of a token slice is its share of the tokens.

    Args:
        batch: `(inputs, labels)`, each a tensor [B, N, ...], or a tuple or dict of tensors.
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        of_hugging_face = (
            "; for dicts of Hugging Face's loaders give the module split_batch of examples/transformers_layers"
        )
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
    # A dict has no main entry.
    found = found if isinstance(tensors, Mapping) else found[:1]
    if found and not any(_has_sequence(tensor, token_slices.seq_length) for tensor in found):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in found)
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


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call a function with the tensors, or other leaves, at each place of trees of the same form."""
    if isinstance(tree, Mapping):
        return {name: map_tensors(function, entry, *(other[name] for other in others)) for name, entry in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_tensors(function, *entries) for entries in zip(tree, *others, strict=True))
    return function(tree, *others)


def cut_along_sequence(tensors: Any, seq_length: int, start: int, end: int) -> Any:
    """Tokens `start` to `end` (exclusive) of the tensors [B, N, ...] in a tree; other tensors stay as they are."""

    def cut(entry: Any) -> Any:
        return entry[:, start:end] if torch.is_tensor(entry) and _has_sequence(entry, seq_length) else entry

    return map_tensors(cut, tensors)


def to_device(tensors: Any, device: torch.device) -> Any:
    """Copy a tensor, or a tuple or dict of tensors, to a device, without a wait of the host."""
    return map_tensors(lambda entry: _moved(entry, device) if torch.is_tensor(entry) else entry, tensors)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == get_accelerator().device_name() != "cpu":
        # Copies from other memory, and of tensors with gaps, make the host wait.
        tensor = tensor.contiguous()
        if not get_accelerator().is_pinned(tensor):
            tensor = get_accelerator().pin_memory(tensor)
    return tensor.to(device, non_blocking=True)


def parts_on_device(
    parts: Sequence[TokenSliceBatch], device: torch.device, seq_length: int, *, inputs: bool, labels: bool
) -> list[TokenSliceBatch]:
    """Copy the data of the token slices of a micro-batch, by one copy of the tensor from which they were cut.

    Dicts are not copied: their entries may be as wide as activations, and are copied for one token slice at a time.

    Args:
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

    def moved(tree: Any, is_read: bool) -> Any:
        return map_tensors(move, tree) if is_read and not isinstance(tree, Mapping) else tree

    return [
        TokenSliceBatch(moved(part.inputs, inputs), moved(part.labels, labels), moved(part.loss_weight, labels))
        for part in parts
    ]


def detached(tensors: Any) -> Any:
    """The values of a tensor, or of a tuple or dict of such, without the graph that computed them."""
    return map_tensors(lambda entry: entry.detach() if torch.is_tensor(entry) else entry, tensors)


def join_token_slices(
    parts: Sequence[Any],
    token_slices: TokenSlices,
    ranks: SequenceParallelRanks | None = None,
    *,
    read_by_all: bool = False,
) -> Any:
    """Join the results of the token slices of a micro-batch, in the same form: the inverse of the cut.

    Tensors with a sequence dimension are concatenated along it; tensors that all token slices have in common are
    returned once; tensors [B, ...] or [] without one are stacked to [B, S, ...] or [S].

    Args:
        parts: data of each token slice, or of this rank's part of it: a tensor, or a tuple or dict of such.
        ranks: ranks that share the token slices, all of which must call this; None for one rank.
        read_by_all: whether these are data, of which each rank has the tensors without a sequence dimension.
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

    return map_tensors(join, *parts)


def join_micro_batches(wholes: Sequence[Any]) -> Any:
    """Join the results of micro-batches: rows after rows, and scalars to one dimension."""

    def join(*wholes: Any) -> Any:
        if not torch.is_tensor(wholes[0]):
            return wholes[0] if all(whole == wholes[0] for whole in wholes) else list(wholes)
        return torch.cat(wholes) if wholes[0].dim() else torch.stack(wholes)

    return map_tensors(join, *wholes)


class MicroBatchReader:
    """The micro-batches of an engine's batches, on one rank.

    Args:
        read: returns the next micro-batch of the data iterator; None on ranks without one.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._ahead: deque[Any] = deque()
        self._ended = False

    def begin(self) -> None:
        """Start a batch."""
        self._ahead, self._ended = deque(), False

    def read_ahead(self, number: int) -> Sequence[Any]:
        """Read the first micro-batches of a batch, and return them, fewer where the iterator ends before."""
        while len(self._ahead) < number and not self._ended:
            try:
                self._ahead.append(self._read())
            except StopIteration:
                self._ended = True  # an error where the missing micro-batch is taken
        return self._ahead

    def take(self) -> Any:
        """The next micro-batch, which may have been read ahead."""
        if self._ahead:
            return self._ahead.popleft()
        if self._ended:
            raise StopIteration
        return self._read()
