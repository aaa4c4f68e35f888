"""Initial weights: each element depends on its position in the whole weight, so a rank draws only its part (ADR 26)."""

from functools import partial

import torch
from torch import Tensor

from megatron_terapipe.model.philox import BLOCK, normal_blocks
from megatron_terapipe.tensor_parallel.ranks import Initializer, WeightPart

_AT_A_TIME = 1 << 17
"""Elements drawn together by each core: their integers stay within its cache, and little is held beside the weight."""


def normal(std: float) -> Initializer:
    """Draw from a normal distribution around 0 (GPT-2: 0.02)."""
    return partial(_draw, std)


def constant(value: float) -> Initializer:
    """Return an initializer that gives every element one value."""
    return lambda weight, _: weight.fill_(value)


def _draw(std: float, weight: Tensor, part: WeightPart) -> None:
    """Fill a part of a weight. Torch's generator gives the whole weight one key, and moves on alike on every rank."""
    if weight.is_meta:
        return
    key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    # Of each `width` elements of the whole weight, one after the other, the part has `own`, from the `first` on.
    inner = weight[(0,) * (part.cut + 1)].numel()
    own, width, first = weight.shape[part.cut] * inner, part.shape[part.cut] * inner, part.start * inner
    rows = weight.view(-1, own)
    together = _AT_A_TIME * (torch.get_num_threads() if weight.device.type == "cpu" else 32)
    several = max(1, together // own)
    for row in range(0, len(rows), several):
        for column in range(0, own, together):
            target = rows[row : row + several, column : column + together]
            starts = torch.arange(row, row + len(target), device=weight.device) * width + (first + column)
            target.copy_(_numbers(starts, target.shape[1], key, aligned=width % BLOCK == 0).mul_(std))


def _numbers(starts: Tensor, length: int, key: int, *, aligned: bool) -> Tensor:
    """Standard normal numbers `start` to `start + length - 1` of each start: float32 [starts, length].

    Args:
        starts: int64.
        aligned: whether all starts are as far from the beginning of a block.
    """
    num_blocks = length // BLOCK + 2  # one more for the rest, one because the start may lie within a block
    blocks = (starts // BLOCK)[:, None] + torch.arange(num_blocks, device=starts.device)
    numbers = normal_blocks(blocks, key).flatten(1)
    offsets = starts % BLOCK
    if aligned or len(starts) == 1:
        return numbers.narrow(1, int(offsets[0]), length)
    return numbers.gather(1, offsets[:, None] + torch.arange(length, device=starts.device))
