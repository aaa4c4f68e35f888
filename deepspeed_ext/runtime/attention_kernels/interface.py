"""Attention of one token slice over the keys and values up to its end: what a kernel takes and gives.

Shapes, here and in `attention`: queries [B, N, H, D] of the N tokens of a token slice; keys and values [B, E, G, D] of
the last E tokens up to its end, H a multiple of G (grouped queries); log-sum-exp [B, H, N], in at least fp32. Query n
sees the keys 0 .. E - N + n, which is causal attention aligned to the bottom right:

    prefix    diagonal
    x x x x | x . .        E - N keys that all queries see, then N keys under the usual causal mask
    x x x x | x x .
    x x x x | x x x

With a sliding window of W tokens it sees the last W of these alone, itself included; so E need be no more than
W - 1 + N. With W = 4:

    . x x x | x . .
    . . x x | x x .
    . . . x | x x x
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class Attended(NamedTuple):
    """Output [B, N, H, D] of attention, and its log-sum-exp [B, H, N]."""

    output: Tensor
    log_sum_exp: Tensor


class Gradients(NamedTuple):
    """Gradients of a token slice's attention, in tensors that nobody else holds."""

    query: Tensor
    """[B, N, H, D]."""
    own: tuple[Tensor, Tensor]
    """Gradients of the token slice's own keys and values, each [B, N, G, D]; not yet complete."""
    prefix: tuple[Tensor, Tensor]
    """Gradients of the last keys and values before it, each [B, P, G, D]; those of earlier ones are 0."""

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """Split gradients of the last P + N keys and values into those of the prefix and of the token slice: views.

        Args:
            query: [B, N, H, D].
            key: [B, P + N, G, D].
            value: [B, P + N, G, D].
        """
        prefix_len = key.shape[1] - query.shape[1]
        return cls(query, (key[:, prefix_len:], value[:, prefix_len:]), (key[:, :prefix_len], value[:, :prefix_len]))


class AttentionKernel(Protocol):
    """Forward and backward of attention, without autograd; shapes as at the top of this file."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return the output [B, N, H, D] and its log-sum-exp [B, H, N].

        Args:
            query: [B, N, H, D].
            key: [B, E, G, D].
            value: [B, E, G, D].
            scale: factor of the scores.
        """

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients of queries, keys and values.

        Args:
            output_gradient: [B, N, H, D].
            query: [B, N, H, D].
            key: [B, E, G, D].
            value: [B, E, G, D].
            scale: factor of the scores.
        """


class QueryTile(NamedTuple):
    """Queries that a kernel computes at once, and the keys they reach, all counted from the first one given."""

    first: int
    end: int
    """Query behind the last one."""
    first_key: int
    """First key that one of them sees."""
    end_key: int
    """Key behind the last that one of them sees."""


def query_tiles(num_queries: int, num_keys: int, window: int | None, at_once: int) -> Iterator[QueryTile]:
    """Tiles of the queries, first to last, each with no more keys than it reaches.

    Args:
        window: keys that a query sees, itself included; None for all up to its own.
        at_once: queries of a tile, but for the last.
    """
    prefix_len = num_keys - num_queries
    for first in range(0, num_queries, at_once):
        end = min(first + at_once, num_queries)
        first_key = 0 if window is None else max(0, prefix_len + first + 1 - window)
        yield QueryTile(first, end, first_key, prefix_len + end)
