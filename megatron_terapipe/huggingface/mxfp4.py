"""Weights in MXFP4, read as bf16, in which every number of MXFP4 is exact.

    OCP Microscaling Formats (MX) Specification, version 1.0: 32 numbers E2M1 of 4 bits, and their exponent E8M0

gpt-oss has the matrices of its experts so. A tensor `w` [E, in, out] is two in a file, both uint8, of transposed
matrices: `w_blocks` [E, out, in / 32, 16], a byte for two numbers, the first in the low half, and `w_scales`
[E, out, in / 32], an exponent and 127.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two."""

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers by their three low bits; the fourth is the sign."""


def packed(names: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors that are two in a file with these names."""
    found = [{each[: -len(end)] for each in names if each.endswith(end)} for end in (BLOCKS, SCALES)]
    return frozenset(found[0] & found[1])


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor, of the shapes of its two; the shape of the blocks where they do not fit."""
    if len(blocks) != 4 or blocks[:3] != scales:
        return blocks
    experts, outputs, groups, width = blocks
    return experts, groups * width * 2, outputs


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a tensor [E, in, out] in bf16 of its blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""
    table = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)])
    found = torch.empty(shape_of(tuple(blocks.shape), tuple(scales.shape)), dtype=torch.bfloat16)
    for matrix, halves, exponents in zip(found, blocks, scales, strict=True):
        codes = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(2)
        matrix.copy_(torch.ldexp(table[codes.int()], exponents.int().unsqueeze(2) - 127).flatten(1).t())
    return found
