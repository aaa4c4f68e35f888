"""What the formula of a reduction inside a node misses: a smooth factor of its seconds, by ranks and message size.

A communication library changes its algorithm and its protocol with the size of the message and the number of ranks
(NCCL's tuning tables: rings or trees, and the protocols LL, LL128 and Simple), which a bandwidth and a latency do not
follow. So calibration has one factor at each of some numbers of ranks and bytes; between them its logarithm is linear
in the logarithm of both, and beyond the outermost it stays what it is there:

    log f(n, B) = sum_ij w_i(log2 n) w_j(log2 B) log f_ij          w: hat functions around RANKS and BYTES

Each f_ij is 1 until trials say otherwise, with a narrow prior of its own. Trials of one size therefore say nothing of
a factor at another, whose prior width remains: predictions for sizes that nobody measured stay less sure.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.op_times.layer_times import ScalarOrArray

RANKS = (2, 4, 8)
"""Ranks of a group, at which factors are."""

BYTES = tuple(2**exponent for exponent in range(20, 28))
"""Bytes of a message, at which factors are: from 1 MiB, below which latencies decide, to 128 MiB."""

NUM_REDUCTION_FACTORS = len(RANKS) * len(BYTES)
"""Number of factors."""


def reduction_factor(factors: tuple[float, ...], num_bytes: ScalarOrArray, num_ranks: ScalarOrArray) -> ScalarOrArray:
    """Return the factor of the seconds of a reduction; arguments broadcast.

    Args:
        factors: [ranks x bytes] at `RANKS` and `BYTES`, the bytes running fastest.
        num_bytes: bytes of the message.
    """
    if all(factor == 1.0 for factor in factors):
        return 1.0
    logs = np.log(factors).reshape(len(RANKS), len(BYTES))
    row, above_row = _place(num_ranks, RANKS)
    column, above_column = _place(num_bytes, BYTES)
    lower = (1 - above_column) * logs[row, column] + above_column * logs[row, column + 1]
    upper = (1 - above_column) * logs[row + 1, column] + above_column * logs[row + 1, column + 1]
    return np.asarray(np.exp((1 - above_row) * lower + above_row * upper))


def _place(value: ScalarOrArray, knots: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The knot below a value, and how far the value is on the way to the next; knots double from one to the next."""
    way = np.clip(np.log2(np.maximum(value, 1e-9) / knots[0]), 0, len(knots) - 1)
    below = np.minimum(way.astype(np.int64), len(knots) - 2)
    return below, np.asarray(way - below)


def carried_by_network(num_ranks: ScalarOrArray, num_nodes: ScalarOrArray) -> ScalarOrArray:
    """Part of the bytes that the network cards of a node carry in one of the two rounds of an all-reduce over nodes.

    Between two nodes each sums inside and exchanges its sum with the other, so that the cards carry the bytes once in
    both rounds; among more, a tree carries as much as a ring. Arguments broadcast.
    """
    return np.where(np.equal(num_nodes, 2), 0.5, (num_ranks - 1) / num_ranks)
