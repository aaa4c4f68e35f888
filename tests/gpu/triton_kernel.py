"""A kernel of Triton that is compiled before the device loads it."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _doubled(numbers, BLOCK: tl.constexpr):  # noqa: N803
    places = tl.arange(0, BLOCK)
    tl.store(numbers + places, tl.load(numbers + places) * 2)


def compiled(numbers: Any) -> Callable[[], object]:
    """The first launch of the kernel, which loads it."""
    _doubled.warmup(numbers, BLOCK=64, grid=(1,))
    return lambda: _doubled[(1,)](numbers, BLOCK=64)
