"""Dropout with masks that depend only on the place of an element, not on the time and rank of the computation.

A random generator returns numbers in the order of the calls, so its masks would change with the token slices, the
stages and the schedule. Here every element of a mask is a hash of its place,

    bits = mix(row(seed, sequence, layer, site, position) ^ column(channel))

so a token slice draws exactly its part of the whole sequence's mask, a backward or a recomputation draws the same one
again, and no mask is ever stored. The mixing steps are multiplications and xor-shifts as in integer hash functions
(Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014). The sequence is numbered by step and place
in the global batch, so masks are the same for any token slices, schedule, ranks and replicas, and checkpoints contain
no state of a random generator. The hash costs a few passes of integer arithmetic over the activation; it is not
cryptographic, and tests bound frequencies and correlations of rows and columns.

Probabilities of attention are dropped in the same way, by (query, head, key). No flash kernel can do that, so
`--attention-dropout` uses unfused attention and is slower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspeed_ext.pointwise import Pointwise

_WORD = (1 << 64) - 1


class DrawnNumbers:
    """Random numbers of a micro-batch on a stage, each drawn once and kept for all of its token slices.

    One for each token and use of dropout, 4 bytes, and one for each channel.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows: dict[tuple[int, tuple[int, ...], torch.device], Tensor] = {}
        self._columns: dict[tuple[int, int, torch.device], Tensor] = {}

    def rows(self, stream: int, sequences: tuple[int, ...], device: torch.device) -> Tensor:
        """Random int32 [B, length] of one use of dropout."""
        key = stream, sequences, device
        if key not in self._rows:
            self._rows[key] = _drawn_rows(stream, sequences, 0, self._length, device)
        return self._rows[key]

    def columns(self, first: int, count: int, device: torch.device) -> Tensor:
        """Random int32 [count] of columns."""
        key = first, count, device
        if key not in self._columns:
            self._columns[key] = _drawn_columns(first, count, device)
        return self._columns[key]


@dataclass(frozen=True, slots=True)
class DropoutPlace:
    """Position of a token slice's tensors, for one use of dropout in one layer."""

    stream: int
    """Number of the seed, the layer and the use."""
    sequences: tuple[int, ...]
    """Number of each row's sequence, unique in the run."""
    start: int
    """Position of the first token."""
    drawn: DrawnNumbers | None = field(default=None, compare=False)
    """Numbers that were drawn for the micro-batch; None to draw them at each call."""

    @classmethod
    def at(
        cls, seed: int, layer: int, site: int, sequences: Sequence[int], start: int, drawn: DrawnNumbers | None = None
    ) -> "DropoutPlace":
        """The place of a use of dropout: `site` is its number in the layer."""
        return cls(_mixed(_mixed(_mixed(seed) ^ layer) ^ site), tuple(sequences), start, drawn)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """Random int32 [B, N], one for each token."""
        if self.drawn is None:
            return _drawn_rows(self.stream, self.sequences, self.start, length, device)
        return self.drawn.rows(self.stream, self.sequences, device)[:, self.start : self.start + length]

    def columns(self, first: int, count: int, device: torch.device) -> Tensor:
        """Random int32 [count], one for each of the columns from `first` on."""
        if self.drawn is None:
            return _drawn_columns(first, count, device)
        return self.drawn.columns(first, count, device)


def dropout(inputs: Tensor, probability: float, place: DropoutPlace, *, residual: Tensor | None = None) -> Tensor:
    """Zero elements of `inputs` [B, N, C] with a probability, and scale the others up by 1 / (1 - probability).

    Args:
        residual: [B, N, C], to which the result is added; None for nothing.
    """
    if not probability:
        return inputs if residual is None else residual + inputs
    return _ByPlace.apply(inputs, residual, _dropped, probability, place)


def jittered(inputs: Tensor, spread: float, place: DropoutPlace) -> Tensor:
    """Multiply each element of [B, N, C] by a number that its place draws evenly from 1 - spread .. 1 + spread."""
    return _ByPlace.apply(inputs, None, _jittered, spread, place)


def head_rows(rows: Tensor, first_head: int, num_heads: int) -> Tensor:
    """Random int32 [B, H, N] of queries by head, from those [B, N] of their tokens."""
    return _head_rows(rows, torch.arange(first_head, first_head + num_heads, dtype=torch.int32, device=rows.device))


def scaled_mask(rows: Tensor, columns: Tensor, probability: float, like: Tensor) -> Tensor:
    """Factors [..., C] that elements are multiplied by: 0, or 1 / (1 - probability).

    Args:
        rows: random int32; as many as `like` has rows.
        columns: random int32 [C].
        like: tensor [..., C] that gives the shape and the type.
    """
    kept = _mix(rows.unsqueeze(-1) ^ columns) >= _threshold(probability)
    return kept.reshape(like.shape).to(like.dtype).mul_(1 / (1 - probability))


class _ByPlace(torch.autograd.Function):
    """A function linear in its inputs, with random numbers of their places: drawn again in the backward, not kept."""

    @staticmethod
    def forward(ctx, inputs, residual, function: Pointwise, amount: float, place: DropoutPlace):
        ctx.settings = function, amount, place
        ctx.adds = residual is not None
        return function(inputs, *_numbers(inputs, place), amount, *([residual] * ctx.adds))

    @staticmethod
    def backward(ctx, output_gradient):
        function, amount, place = ctx.settings
        of_inputs = function(output_gradient, *_numbers(output_gradient, place), amount)
        return of_inputs, output_gradient if ctx.adds else None, None, None, None


def _numbers(inputs: Tensor, place: DropoutPlace) -> tuple[Tensor, Tensor]:
    """The random rows [B, N] and columns [C] of [B, N, C]."""
    return place.rows(inputs.shape[1], inputs.device), place.columns(0, inputs.shape[2], inputs.device)


def _drawn_rows(stream: int, sequences: Sequence[int], start: int, length: int, device: torch.device) -> Tensor:
    # Numbers go to the device as arguments of kernels: a tensor made of a list would be copied, with a wait.
    keys = [
        torch.full((1,), _signed(_mixed(stream ^ sequence), 64), dtype=torch.int64, device=device)
        for sequence in sequences
    ]
    positions = torch.arange(start, start + length, dtype=torch.int32, device=device)
    return _rows(keys[0] if len(keys) == 1 else torch.cat(keys), positions)


def _drawn_columns(first: int, count: int, device: torch.device) -> Tensor:
    return _columns(torch.arange(first, first + count, dtype=torch.int32, device=device))


@Pointwise
def _rows(keys: Tensor, positions: Tensor) -> Tensor:
    """Random int32 [B, N] from the key of each row, int64 [B], and the position of each token, int32 [N]."""
    low, high = (half.to(torch.int32).unsqueeze(1) for half in (keys, keys >> 32))
    return _mix(_mix(positions + low) ^ high)


@Pointwise
def _columns(numbers: Tensor) -> Tensor:
    return _mix(numbers)


@Pointwise
def _head_rows(rows: Tensor, heads: Tensor) -> Tensor:
    return _mix(rows.unsqueeze(1) ^ _mix(~heads)[:, None])


@Pointwise
def _dropped(
    inputs: Tensor, rows: Tensor, columns: Tensor, probability: float, residual: Tensor | None = None
) -> Tensor:
    dropped = inputs * scaled_mask(rows, columns, probability, inputs)
    return dropped if residual is None else residual + dropped


@Pointwise
def _jittered(inputs: Tensor, rows: Tensor, columns: Tensor, spread: float) -> Tensor:
    drawn = _mix(rows.unsqueeze(-1) ^ columns).to(torch.promote_types(inputs.dtype, torch.float32))
    return (inputs * (1 + drawn * (spread * 2**-31))).to(inputs.dtype)


def _threshold(probability: float) -> int:
    """The int32 that a random one is below with a probability."""
    return _signed(min(int(probability * 2**32) + 2**31, 2**32 + 2**31 - 1))


def _mix(bits: Tensor) -> Tensor:
    """Spread every bit of int32 over all, in a copy."""
    # Shifts of negative numbers bring ones in from the left; the mask takes them away again.
    mixed = bits * _signed(0x9E3779B1)
    mixed ^= (mixed >> 15).bitwise_and_(0x1FFFF)
    mixed *= _signed(0x85EBCA77)
    mixed ^= (mixed >> 13).bitwise_and_(0x7FFFF)
    mixed *= _signed(0xC2B2AE3D)
    return mixed


def _mixed(word: int) -> int:
    """Spread every bit of 64 over all."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & _WORD
    return word ^ word >> 31


def _signed(word: int, bits: int = 32) -> int:
    """The signed integer with the low bits of a number."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> bits - 1 else word
