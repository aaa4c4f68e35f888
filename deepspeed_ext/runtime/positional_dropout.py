"""Dropout whose masks depend on where an element is, never on when or on which rank it is computed.

A random generator hands out numbers in the order of the calls, so its masks would change with the token slices, the
stages and the schedule. Here every element of a mask is a hash of its place,

    bits = mix(row(seed, sequence, layer, site, position) ^ column(channel))

so a token slice draws exactly its part of the whole sequence's mask, a backward or a recomputation draws the same one
again, and no mask is ever stored. The mixing steps are multiplications and xor-shifts as in integer hash functions
(Steele et al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DropoutPlace:
    """Where a token slice's tensors are, for one use of dropout in one layer.

    Attributes:
        stream: number of the seed, the layer and the use.
        sequences: number of each row's sequence, unlike that of any other sequence of the run.
        start: position of the first token.
    """

    stream: int
    sequences: tuple[int, ...]
    start: int

    @classmethod
    def at(cls, seed: int, layer: int, site: int, sequences: Sequence[int], start: int) -> "DropoutPlace":
        """The place of a use of dropout.

        Args:
            seed: of the run.
            layer: of the model.
            site: which of the layer's uses.
            sequences: number of each row's sequence.
            start: position of the first token.
        """
        return cls(_mixed(_mixed(_mixed(seed) ^ layer) ^ site), tuple(sequences), start)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """Random int32 [B, N], one for each token."""
        keys = [_mixed(self.stream ^ sequence) for sequence in self.sequences]
        low, high = (
            torch.tensor([_signed(key >> shift & 0xFFFFFFFF) for key in keys], dtype=torch.int32, device=device)
            for shift in (0, 32)
        )
        positions = torch.arange(self.start, self.start + length, dtype=torch.int32, device=device)
        return _mix(_mix(positions + low[:, None]) ^ high[:, None])


def dropout(inputs: Tensor, probability: float, place: DropoutPlace, *, first_channel: int = 0) -> Tensor:
    """Zero elements of `inputs` [B, N, C] with a probability, and scale the others up by 1 / (1 - probability).

    Args:
        inputs: [B, N, C].
        probability: of zero.
        place: of the tokens.
        first_channel: channel of the first column, where a rank holds some of the channels.
    """
    return _Dropout.apply(inputs, probability, place, first_channel) if probability else inputs


def keep_mask(rows: Tensor, first_column: int, num_columns: int, probability: float) -> Tensor:
    """Which elements stay: bool [..., C] from random rows [...].

    Args:
        rows: random int32, [...].
        first_column: number of the first column.
        num_columns: columns C.
        probability: that an element does not stay.
    """
    columns = torch.arange(first_column, first_column + num_columns, dtype=torch.int32, device=rows.device)
    return _mix(rows.unsqueeze(-1) ^ _mix(columns)) >= _signed(min(int(probability * 2**32) + 2**31, 2**32 + 2**31 - 1))


def attention_keep_mask(
    rows: Tensor, first_head: int, num_heads: int, first_key: int, num_keys: int, probability: float
) -> Tensor:
    """Which probabilities of attention stay: bool [B, H, N, E] from random rows [B, N] of the queries.

    Args:
        rows: random int32, [B, N].
        first_head: number of the first head.
        num_heads: heads H.
        first_key: position of the first key.
        num_keys: keys E.
        probability: that one does not stay.
    """
    heads = torch.arange(first_head, first_head + num_heads, dtype=torch.int32, device=rows.device)
    return keep_mask(_mix(rows.unsqueeze(1) ^ _mix(~heads)[:, None]), first_key, num_keys, probability)


class _Dropout(torch.autograd.Function):
    """Its graph keeps no tensor: the mask is drawn again."""

    @staticmethod
    def forward(ctx, inputs, probability: float, place: DropoutPlace, first_channel: int):
        ctx.settings = probability, place, first_channel
        return _dropped(inputs, probability, place, first_channel)

    @staticmethod
    def backward(ctx, output_gradient):
        return _dropped(output_gradient, *ctx.settings), None, None, None


def _dropped(inputs: Tensor, probability: float, place: DropoutPlace, first_channel: int) -> Tensor:
    kept = keep_mask(place.rows(inputs.shape[1], inputs.device), first_channel, inputs.shape[2], probability)
    return inputs * kept.to(inputs.dtype).mul_(1 / (1 - probability))


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


def _signed(word: int) -> int:
    """The int32 with the low 32 bits of a number."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
