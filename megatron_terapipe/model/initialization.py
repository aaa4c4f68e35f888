"""Initial weights: each element depends on its position in the whole weight, so a rank draws only its part (ADR 26).

First normal numbers by their place: number `i` of a key, whichever others are drawn, and in whatever order.

    block b = i // 4:   Philox4x32-10(counter = b, key)  ->  4 words of 32 bits  ->  4 normal numbers
                                                                                      |
    i % 4 picks one of them  <--------------------------------------------------------'

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), describe the generator; Box and Muller, A Note on
the Generation of Random Normal Deviates (1958), the way from uniform to normal numbers.

After the integers there are only additions, products, quotients and square roots of float32, one tensor operation each.
IEEE 754 rounds each of them correctly, so a number does not depend on where in a tensor it is computed. `torch.log` and
`torch.cos` would: their last digit differs between the middle and the end of a tensor.
"""

from collections.abc import Callable
from functools import partial
from math import log, pi

import torch
from torch import Tensor

from megatron_terapipe.model.tensor_parallel import Initializer, WeightPart

BLOCK = 4
"""Numbers of one counter."""

_WORD = (1 << 32) - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter, each in [0, 2**32): int64 [...].

    Args:
        counter: four words of each counter, each in [0, 2**32): int64 [...].
        key: in [0, 2**64).
    """
    # A product of two words has 64 bits. It may turn an int64 negative, but its bits are right.
    first, second, third, fourth = counter
    low, high = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        left, right = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first = (right >> 32).bitwise_xor_(second).bitwise_xor_(low).bitwise_and_(_WORD)
        third = (left >> 32).bitwise_xor_(fourth).bitwise_xor_(high).bitwise_and_(_WORD)
        # Their high halves are not cleared: the next operation masks them.
        second, fourth = right, left
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return first, second & _WORD, third, fourth & _WORD


def normal_blocks(blocks: Tensor, key: int) -> Tensor:
    """The standard normal numbers of blocks: float32 [..., 4] for int64 [...] of block numbers, at least 0."""
    zero = torch.zeros_like(blocks)
    first, second, third, fourth = philox((blocks & _WORD, blocks >> 32, zero, zero), key)
    radius = _root_of_minus_log(torch.stack((first, third), -1))
    cosine, sine = _root_two_of_circle(torch.stack((second, fourth), -1))
    return torch.stack((radius * cosine, radius * sine), -1).flatten(-2)


def _root_of_minus_log(words: Tensor) -> Tensor:
    """The square root of -log(u), where u = (w + 1/2) / 2**32 in (0, 1]."""
    mantissa, exponent = torch.frexp(words.to(torch.float32).add_(0.5))
    # u = sqrt(1/2) t 2**(e - 32) with t in [sqrt(1/2), sqrt(2)), where log t = 2 artanh((t - 1) / (t + 1)).
    scaled = mantissa.mul_(2**0.5)
    ratio = (scaled - 1).div_(scaled.add_(1))
    square = ratio * ratio
    series = (square * (1 / 7)).add_(1 / 5).mul_(square).add_(1 / 3).mul_(square).add_(1).mul_(ratio).mul_(2)
    logarithm = exponent.to(torch.float32).sub_(32.5).mul_(log(2)).add_(series)
    # Next to u = 1 rounding may leave a little above 0.
    return logarithm.neg_().clamp_(min=0).sqrt_()


def _root_two_of_circle(words: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(2) times cosine and sine of a random angle."""
    # 30 bits are the angle in the first quadrant, 2 the quadrant.
    angle = (words & ((1 << 30) - 1)).to(torch.float32).add_(0.5).mul_(pi / 2 / (1 << 30)).sub_(pi / 4)
    square = angle * angle
    cosine = (square * (1 / 40320)).sub_(1 / 720).mul_(square).add_(1 / 24).mul_(square).sub_(1 / 2)
    cosine = cosine.mul_(square).add_(1)
    sine = (square * (1 / 362880)).sub_(1 / 5040).mul_(square).add_(1 / 120).mul_(square).sub_(1 / 6)
    sine = sine.mul_(square).add_(1).mul_(angle)
    # cos(x + pi/4) and sin(x + pi/4), times sqrt(2).
    return (cosine - sine).mul_(_sign(words, 30)), cosine.add_(sine).mul_(_sign(words, 31))


def _sign(words: Tensor, bit: int) -> Tensor:
    return (words >> bit).bitwise_and_(1).to(torch.float32).mul_(-2).add_(1)


_AT_A_TIME = 1 << 17
"""Elements drawn together by each core: their integers fit into its cache, and need little memory."""


def normal(std: float) -> Initializer:
    """Draw from a normal distribution around 0 (GPT-2: 0.02)."""
    return partial(_draw, std)


def uniform(low: float, high: float, function: Callable[[Tensor], Tensor] | None = None) -> Initializer:
    """Draw from a uniform distribution; with a function, the weight is its value there."""

    def fill(weight: Tensor, part: WeightPart) -> None:
        _draw(1.0, weight, part)
        # In fp64 the last digits, which depend on a number's place in a tensor, are rounded away.
        numbers = low + (high - low) * torch.special.ndtr(weight.double())
        weight.copy_(numbers if function is None else function(numbers))

    return fill


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
    num_blocks = length // BLOCK + 2  # one more for the rest, one because the start may be within a block
    blocks = (starts // BLOCK)[:, None] + torch.arange(num_blocks, device=starts.device)
    numbers = normal_blocks(blocks, key).flatten(1)
    offsets = starts % BLOCK
    if aligned or len(starts) == 1:
        return numbers.narrow(1, int(offsets[0]), length)
    return numbers.gather(1, offsets[:, None] + torch.arange(length, device=starts.device))
