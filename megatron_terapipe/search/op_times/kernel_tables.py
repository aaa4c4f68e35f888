"""Measured kernels between their measured sizes: FLOP/s, interpolated in the logarithms of the sizes.

Beyond the largest measured size the FLOP/s stay as they were there, which is what large kernels do; below the smallest
one the time does, which is what small ones do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.layer_times import ScalarOrArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KernelTables:
    """Measured speeds of matrix products and attention on one device.

    Attributes:
        rows: [R] rows of products, rising.
        inputs: [K] their inputs.
        outputs: [N] their outputs.
        products: [R, K, N] logarithm of the FLOP/s of each.
        attention_flops: [A] FLOPs of flash attention kernels, rising; empty = not measured.
        attention: [A] logarithm of their FLOP/s.
        source: where the figures are from.
    """

    rows: Floats
    inputs: Floats
    outputs: Floats
    products: Floats
    attention_flops: Floats
    attention: Floats
    source: str

    def product_s(self, rows: ScalarOrArray, inputs: ScalarOrArray, outputs: ScalarOrArray) -> ScalarOrArray:
        """Seconds of a product of [rows, inputs] and [inputs, outputs]; arguments broadcast.

        Args:
            rows: rows of the first matrix.
            inputs: its columns.
            outputs: columns of the second matrix.
        """
        axes = (self.rows, rows), (self.inputs, inputs), (self.outputs, outputs)
        places = [_place(axis, np.asarray(size, dtype=float)) for axis, size in axes]
        speed: ScalarOrArray = 0.0
        for corner in range(8):
            bits = [corner >> axis & 1 for axis in range(3)]
            index = tuple(below + bit for (below, _), bit in zip(places, bits, strict=True))
            weight: ScalarOrArray = 1.0
            for (_, share), bit in zip(places, bits, strict=True):
                weight = weight * (share if bit else 1 - share)
            speed = speed + weight * self.products[index]
        computed = 2.0
        for axis, size in axes:
            computed = computed * np.maximum(size, axis[0])
        return computed / np.exp(speed)

    def attention_s(self, flops: ScalarOrArray) -> ScalarOrArray | None:
        """Seconds [...] of a flash attention of these FLOPs [...]; None if none was measured."""
        if not len(self.attention_flops):
            return None
        known = np.maximum(flops, self.attention_flops[0])
        return np.asarray(known / np.exp(np.interp(np.log(known), np.log(self.attention_flops), self.attention)))


def _place(axis: Floats, size: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Index of the measured size below, and how far the size is from it to the next, from 0 to 1."""
    logs = np.log(axis)
    at = np.log(np.clip(size, axis[0], axis[-1]))
    below = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, len(axis) - 2)
    return below, (at - logs[below]) / (logs[below + 1] - logs[below])


def product_table(
    rows: Floats, inputs: Floats, outputs: Floats, seconds: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """Axes and logarithms of FLOP/s of measured products, given one by one.

    A size that was not measured takes the FLOP/s of the product nearest to it, its inputs first.

    Args:
        rows: [n].
        inputs: [n].
        outputs: [n].
        seconds: [n].
    """
    axes = [np.unique(column) for column in (rows, inputs, outputs)]
    grid = np.full([len(axis) for axis in axes], np.nan)
    places = [np.searchsorted(axis, column) for axis, column in zip(axes, (rows, inputs, outputs), strict=True)]
    grid[tuple(places)] = np.log(2 * rows * inputs * outputs / seconds)
    for axis in range(3):
        moved = np.moveaxis(grid, axis, 0)
        for step in (range(1, len(moved)), range(len(moved) - 2, -1, -1)):
            for index in step:
                neighbour = moved[index - 1 if step.step > 0 else index + 1]
                moved[index] = np.where(np.isnan(moved[index]), neighbour, moved[index])
    return axes[0], axes[1], axes[2], grid
