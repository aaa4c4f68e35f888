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
    """What the backward of a token slice's attention finds, in tensors that nobody else holds.

    Attributes:
        query: [B, N, H, D].
        own: of the token slice's own keys and values, each [B, N, G, D]; not yet complete.
        prefix: of the last keys and values before it, each [B, P, G, D]; those of all before these P are 0.
    """

    query: Tensor
    own: tuple[Tensor, Tensor]
    prefix: tuple[Tensor, Tensor]

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """From gradients of the last P + N keys and values: views."""
        prefix_len = key.shape[1] - query.shape[1]
        return cls(query, (key[:, prefix_len:], value[:, prefix_len:]), (key[:, :prefix_len], value[:, :prefix_len]))


class AttentionKernel(Protocol):
    """Forward and backward of attention, without autograd."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend."""

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Gradients of queries, keys and values from that of the output."""
