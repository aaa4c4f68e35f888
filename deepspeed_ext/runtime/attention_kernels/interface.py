"""Attention of one token slice over the keys and values up to its end: what a kernel takes and gives.

Shapes, here and in `attention`: queries [B, N, H, D] of the N tokens of a token slice; keys and values [B, E, G, D] of
all E tokens up to its end, H a multiple of G (grouped queries); log-sum-exp [B, H, N], in at least fp32. Query n sees
the keys 0 .. E - N + n, which is causal attention aligned to the bottom right:

    prefix    diagonal
    x x x x | x . .        E - N keys that all queries see, then N keys under the usual causal mask
    x x x x | x x .
    x x x x | x x x
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Attended(NamedTuple):
    """Output [B, N, H, D] of attention, and its log-sum-exp [B, H, N]."""

    output: Tensor
    log_sum_exp: Tensor


class Gradients(NamedTuple):
    """Gradients of a token slice's attention, in tensors that nobody else holds.

    Attributes:
        query: [B, N, H, D].
        own: gradients of the token slice's own keys and values, each [B, N, G, D]; not yet complete.
        prefix: gradients of the last keys and values before it, each [B, P, G, D]; those of earlier ones are 0.
    """

    query: Tensor
    own: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]

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
            attended: output and log-sum-exp of the forward.
            scale: factor of the scores.
        """
