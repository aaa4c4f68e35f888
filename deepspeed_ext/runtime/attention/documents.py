"""Documents packed in a sequence, and attention within each of them.

Every stage reads the starts of documents from the data, which is deterministic: sent with activations, each layer would
have to pass them on.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash, Runs
from deepspeed_ext.runtime.attention.kernels import Attended, AttentionKernel, Gradients, PiecewiseAttention, Places
from deepspeed_ext.runtime.micro_batch import to_device


@dataclass(frozen=True, slots=True)
class Documents:
    """Starts of the documents in the rows of a micro-batch."""

    starts: tuple[tuple[int, ...], ...]
    """For each row, the positions at which a document begins, ascending; the first is 0."""
    attend_apart: bool = True
    """Whether tokens attend only to their own document."""
    positions_restart: bool = True
    """Positions count from the start of the document."""
    numbered: bool = False
    """Whether layers read `numbers`."""
    numbers: Tensor | None = field(default=None, compare=False, repr=False)
    """Number of the document of each token [B, T], counted over all rows, on the device of the layers."""
    whole: Tensor | None = field(default=None, compare=False, repr=False)
    """Positions [B, T] of whole sequences, once they are on the device of the layers."""
    seen_from: Mapping[int, tuple["SeenKeys", ...]] = field(default_factory=dict, compare=False, repr=False)
    """Keys of token slices, by their first token, if they are on a device already; see `on`."""

    def on(self, device: torch.device, token_slices: TokenSlices) -> "Documents":
        """These documents with the tensors of the token slices on a device, by one copy."""
        whole, seen_from, numbers = self.whole, self.seen_from, self.numbers
        if self.numbered:
            begins = self.begins(0, token_slices.seq_length)
            numbers = to_device((begins.flatten().cumsum(0) - 1).view_as(begins), device)
        if self.positions_restart:
            whole = to_device(self.positions(0, token_slices.seq_length), device)
        if self.attend_apart and device.type != "cpu":
            seen_from = self._seen(token_slices.bounds(), device)
        return replace(self, whole=whole, seen_from=seen_from, numbers=numbers)

    def begins(self, start: int, end: int) -> Tensor:
        """Whether a document begins at each of the tokens start .. end: [B, end - start]."""
        begins = torch.zeros(len(self.starts), end - start, dtype=torch.bool)
        for of_row, row in zip(begins, self.starts, strict=True):
            inner = row[bisect_left(row, start) : bisect_left(row, end)]
            of_row[[each - start for each in inner]] = True
        return begins

    def positions(self, start: int, length: int) -> Tensor:
        """Positions [B, N] of the tokens start .. start + N in their documents."""
        if self.whole is not None:
            return self.whole[:, start : start + length]
        positions = torch.arange(start, start + length).repeat(len(self.starts), 1)
        for of_row, row in zip(positions, self.starts, strict=True):
            first, inner = _begun(row, start, start + length)
            begins = torch.tensor([first, *inner])
            ends = torch.tensor([*inner, start + length])
            of_row -= begins.repeat_interleave(ends - begins.clamp(min=start), output_size=length)
        return positions

    def seen(self, start: int, end: int, device: torch.device, window: int | None = None) -> tuple["SeenKeys", ...]:
        """Keys that the tokens start .. end of each row attend to: of their documents up to `end`, in their windows."""
        seen = self.seen_from.get(start) or self._seen([(start, end)], device)[start]
        return seen if window is None else tuple(row.within(window, start) for row in seen)

    def _seen(self, bounds: Iterable[tuple[int, int]], device: torch.device) -> Mapping[int, tuple["SeenKeys", ...]]:
        """Return the result of `seen` for each token slice, by its first token."""
        runs, ends = [], []
        for start, end in bounds:
            for row in self.starts:
                first_key, inner = _begun(row, start, end)
                of_row = [[each - first for each in (first, *inner, end)] for first in (start, first_key)]
                runs.append((start, first_key, *map(_longest, of_row)))
                ends += of_row
        numbers = torch.tensor([each for part in ends for each in part], dtype=torch.int32)
        # One copy for all of them, without a wait.
        tensors = iter(to_device(numbers, device).split([len(part) for part in ends]))
        seen: dict[int, tuple[SeenKeys, ...]] = defaultdict(tuple)
        for start, first_key, *longest in runs:
            seen[start] += (SeenKeys(first_key, Runs(next(tensors), next(tensors), *longest)),)
        return dict(seen)


def _begun(starts: Sequence[int], start: int, end: int) -> tuple[int, Sequence[int]]:
    """Start of the document that has the token `start`, and the starts after it before `end`.

    A sequence of a million tokens may have 100,000 documents, and every layer calls this for every token slice: so it
    bisects.
    """
    inner = bisect_right(starts, start)
    return starts[inner - 1], starts[inner : bisect_left(starts, end, inner)]


class SeenKeys(NamedTuple):
    """Keys that the tokens of a token slice attend to, in one row.

    keys        [ document 0 | document 1         | document 2 ]      of the row, up to the end of the token slice
    queries                       [ 1 1 1 1 1 1 1 1 2 2 2 2 2 2 ]     this token slice
                             first key
    """

    first_key: int
    """Start of the first document that has tokens in the token slice; keys before it are not used."""
    runs: Runs
    """Its documents, keys counted from `first_key`."""

    def within(self, window: int, start: int) -> "SeenKeys":
        """The keys that are in reach of a window."""
        out_of_reach = start + 1 - window - self.first_key
        if out_of_reach <= 0:
            return self
        # The first run loses keys, so all bounds move; computed on the device, without a wait.
        keys = (self.runs.keys - out_of_reach).clamp_(min=0)
        longest = min(self.runs.longest_keys, window - 1 + self.runs.longest_queries)
        return SeenKeys(self.first_key + out_of_reach, self.runs._replace(keys=keys, longest_keys=longest))


def _longest(cumulative: Sequence[int]) -> int:
    return max(end - start for start, end in pairwise(cumulative))


class DocumentsAtOnce:
    """Attention within each document, by a kernel that takes many in one call: one call for each row."""

    def __init__(self, kernel: CudaFlash, seen: Sequence[SeenKeys], end: int) -> None:
        self._kernel, self._seen, self._end = kernel, seen, end

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend row by row, as in `AttentionKernel`."""
        given_from = self._end - key.shape[1]  # Keys out of reach are not given.
        rows = []
        for row, seen in enumerate(self._seen):
            keys = slice(seen.first_key - given_from, None)
            rows.append(self._kernel.forward(query[row], key[row, keys], value[row, keys], scale, seen.runs))
        return Attended(*(_stacked(each) for each in zip(*rows, strict=True)))

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, row by row, as in `AttentionKernel`.

        Keys that no query of a row attends to get 0; if no row does, they have none.
        """
        first_key, given_from = min(seen.first_key for seen in self._seen), self._end - key.shape[1]
        rows = []
        for row, (first, runs) in enumerate(self._seen):
            keys = slice(first - given_from, None)
            of_row = Attended(attended.output[row], attended.log_sum_exp[row])
            of_query, *of_seen = self._kernel.gradients(
                output_gradient[row], query[row], key[row, keys], value[row, keys], of_row, scale, runs
            )
            if first > first_key:
                of_seen = [F.pad(each, (0, 0, 0, 0, first - first_key, 0)) for each in of_seen]
            rows.append((of_query, *of_seen))
        return Gradients.cut(*(_stacked(each) for each in zip(*rows, strict=True)))


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows as one tensor; a single row is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(tuple(rows))


def document_attention(
    kernel: Callable[[int, int, int], AttentionKernel], documents: Documents, end: int, window: int | None = None
) -> PiecewiseAttention:
    """Attention within each document, by any kernel: one call for each piece of a document.

    A document may have begun in an earlier token slice. Its piece then attends to a prefix and to itself, as a token
    slice does; the prefix begins at the document:

        keys      [ document 0 | document 1         ]      of a row, up to the end of this token slice
        queries                       [ 1 1 1 1 1 1 ]      this token slice: one piece
                               prefix   diagonal

    Pieces share no keys: each is of another document, or of another row.

    Args:
        kernel: of a piece, given its row, its first query and its first key, counted in the whole sequence.
        end: end of the token slice (exclusive).
    """

    def pieces(query: Tensor, key: Tensor) -> Iterator[tuple[AttentionKernel, Places, Places]]:
        start, given_from = end - query.shape[1], end - key.shape[1]
        for row, starts in enumerate(documents.starts):
            of_first, inner = _begun(starts, start, end)
            for begin, end_of_piece in pairwise((of_first, *inner, end)):
                first = max(begin, start)
                reached = begin if window is None else max(begin, first + 1 - window)
                here = slice(row, row + 1), slice(first - start, end_of_piece - start)
                keys = slice(row, row + 1), slice(reached - given_from, end_of_piece - given_from)
                yield kernel(row, first, reached), here, keys

    return PiecewiseAttention(pieces)
