"""Attention of one token slice over the keys and values up to its end: the interface of kernels, and the plain kernel.

Shapes, here and in `attention`: queries [B, N, H, D] of the N tokens of a token slice; keys and values [B, E, G, D] of
the last E tokens up to its end, H a multiple of G (grouped queries); log-sum-exp [B, H, N], in at least fp32. Query n
attends to the keys 0 .. E - N + n, which is causal attention aligned to the bottom right:

    prefix    diagonal
    x x x x | x . .        E - N keys for all queries, then N keys under the usual causal mask
    x x x x | x x .
    x x x x | x x x

With a sliding window of W tokens it attends only to the last W of these, its own included; so E need be no more than
W - 1 + N. `window` is W, also in the other modules; None where a query attends to all keys up to its own. With W = 4:

    . x x x | x . .
    . . x x | x x .
    . . . x | x x x
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.plan.costs import SCORES_AT_ONCE, tile_length
from deepspeed_ext.pointwise import Pointwise
from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace, head_rows, scaled_mask


class Attended(NamedTuple):
    """Output [B, N, H, D] of attention, and its log-sum-exp [B, H, N]."""

    output: Tensor
    log_sum_exp: Tensor


class Gradients(NamedTuple):
    """Gradients of a token slice's attention, in tensors without another owner."""

    query: Tensor
    """[B, N, H, D]."""
    own: tuple[Tensor, ...]
    """Gradients of the token slice's own keys and values, each [B, N, G, D]; from its own queries only."""
    prefix: tuple[Tensor, ...]
    """Gradients of the last keys and values before it, each [B, P, G, D]; earlier ones have gradients of 0."""

    @classmethod
    def cut(cls, query: Tensor, key: Tensor, value: Tensor) -> "Gradients":
        """Split gradients [B, P + N, heads, D] into views: the prefix P and the token slice N."""
        prefix_len = key.shape[1] - query.shape[1]
        return cls(query, (key[:, prefix_len:], value[:, prefix_len:]), (key[:, :prefix_len], value[:, :prefix_len]))


class AttentionKernel(Protocol):
    """Forward and backward of attention, without autograd; shapes as at the top of this file."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return the output [B, N, H, D] and its log-sum-exp [B, H, N]."""

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients of queries, keys and values; `output_gradient` is [B, N, H, D]."""


@Pointwise
def with_sinks(output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of queries that also attend to a sink: a learned score of each head, of a key whose value is 0.

    Of the log-sum-exps l of the keys and l' = log(exp(l) + exp(sink)) the output is exp(l - l') of that without sinks
    (Xiao et al., arXiv 2309.17453 equation 2, with a learned score). From this output and l' every kernel computes
    exact gradients of queries, keys and values, as CPU flash attention does of a part of the keys.

    Args:
        output: [B, N, H, D].
        log_sum_exp: [B, H, N].
        sinks: [H].
    """
    scores = sinks.to(log_sum_exp.dtype).unsqueeze(1)
    share = (log_sum_exp - scores).sigmoid().transpose(1, 2).unsqueeze(-1)
    return (output * share).to(output.dtype), torch.logaddexp(log_sum_exp, scores)


@Pointwise
def gradient_of_sinks(output_gradient: Tensor, output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [H]: the gradient of a score whose value is 0, summed over rows and queries.

    Args:
        output_gradient: [B, N, H, D].
        output: [B, N, H, D], with sinks, as the log-sum-exp.
    """
    weights = (sinks.to(log_sum_exp.dtype).unsqueeze(1) - log_sum_exp).exp()
    rows = (output_gradient * output).sum(-1, dtype=log_sum_exp.dtype).transpose(1, 2)
    return -(weights * rows).sum((0, 2)).to(sinks.dtype)


class QueryTile(NamedTuple):
    """Queries that a kernel computes at once, and the keys in their reach."""

    queries: slice
    keys: slice


def query_tiles(num_queries: int, num_keys: int, window: int | None, at_once: int) -> Iterator[QueryTile]:
    """Tiles of the queries, first to last, each with the keys in its reach.

    Args:
        at_once: queries of a tile; the last one may have fewer.
    """
    prefix_len = num_keys - num_queries
    for first in range(0, num_queries, at_once):
        end = min(first + at_once, num_queries)
        first_key = 0 if window is None else max(0, prefix_len + first + 1 - window)
        yield QueryTile(slice(first, end), slice(first_key, prefix_len + end))


Places = tuple[slice, slice]
"""Rows and tokens in a tensor."""


class PiecewiseAttention:
    """Attention of pieces of the queries, each to some of the keys, by a kernel of its own.

    Args:
        pieces: kernels of all pieces of queries and keys, with the places of their queries and keys in the tensors.
            Sums of gradients for keys of several pieces are in the type of the keys; keys of none get 0.
    """

    def __init__(self, pieces: Callable[[Tensor, Tensor], Iterable[tuple[AttentionKernel, Places, Places]]]) -> None:
        self._pieces = pieces

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Attend piece by piece, as in `AttentionKernel`."""
        output = query.new_empty((*query.shape[:3], value.shape[-1]))
        at_least_fp32 = torch.promote_types(query.dtype, torch.float32)
        log_sum_exp = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=at_least_fp32)
        for kernel, here, keys in self._pieces(query, key):
            attended = kernel.forward(query[here], key[keys], value[keys], scale)
            output[here] = attended.output
            log_sum_exp[here[0], :, here[1]] = attended.log_sum_exp
        return Attended(output, log_sum_exp)

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, piece by piece, as in `AttentionKernel`."""
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for kernel, here, keys in self._pieces(query, key):
            of_piece = Attended(attended.output[here], attended.log_sum_exp[here[0], :, here[1]].contiguous())
            gradients = kernel.backward(output_gradient[here], query[here], key[keys], value[keys], of_piece, scale)
            of_query[here] = gradients.query
            for total, prefix, own in zip((of_key, of_value), gradients.prefix, gradients.own, strict=True):
                total[keys][:, : prefix.shape[1]] += prefix
                total[keys][:, prefix.shape[1] :] += own
        return Gradients.cut(of_query, of_key, of_value)


class PaddedValues:
    """A kernel that takes queries, keys and values of one width, for narrower values: channels of 0 change no other."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output [B, N, H, v] and log-sum-exp, as in `AttentionKernel`."""
        attended = self._kernel.forward(query, key, _widened(value, query), scale)
        return attended._replace(output=attended.output[..., : value.shape[-1]])

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, as in `AttentionKernel`."""
        wide = attended._replace(output=_widened(attended.output, query))
        given = _widened(output_gradient, query), query, key, _widened(value, query)
        gradients = self._kernel.backward(*given, wide, scale)
        (of_key, of_value), (of_keys_before, of_values_before) = gradients.own, gradients.prefix
        narrow = slice(0, value.shape[-1])
        return Gradients(
            gradients.query, (of_key, of_value[..., narrow]), (of_keys_before, of_values_before[..., narrow])
        )


def for_values(kernel: AttentionKernel, query: Tensor, value_size: int) -> AttentionKernel:
    """Return a kernel of one width for values of a width: as it is, or padded for values narrower than the queries."""
    return kernel if value_size == query.shape[-1] else PaddedValues(kernel)


def _widened(heads: Tensor, query: Tensor) -> Tensor:
    return F.pad(heads, (0, query.shape[-1] - heads.shape[-1]))


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout on the probabilities of attention."""

    probability: float
    """Probability of zero, above 0."""
    place: DropoutPlace
    first_head: int = 0
    """Number of the first query head, where a rank holds some of them."""
    first_key: int = 0
    """Position of the first key."""

    def numbers(self, length: int, num_heads: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Random int32 [B, H, N] of queries by head and [E] of keys, which make the mask, and the probability."""
        rows = head_rows(self.place.rows(length, device), self.first_head, num_heads)
        return rows, self.place.columns(self.first_key, num_keys, device), self.probability


_Numbers = tuple[Tensor, Tensor, float] | tuple[()]
"""Random numbers of a mask as `AttentionDropout.numbers` gives them; none without dropout."""


class PlainAttention:
    """Attention written out, for cases without a fused kernel: devices, dtypes, soft caps, and dropout by position.

    Scores [B, G, H/G, n, E] of a tile of n queries exist while it is computed; the backward computes them again. A tile
    reads only the keys in reach of its queries.

    Args:
        dropout: on the probabilities; None for none.
        softcap: limit c of the scores: a scaled score x becomes c tanh(x / c); None for none.
        scores_at_once: most scores of a tile, if it has more than one query.
    """

    def __init__(
        self,
        dropout: AttentionDropout | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        scores_at_once: int = SCORES_AT_ONCE,
    ) -> None:
        self._dropout, self._window, self._softcap = dropout, window, softcap
        self._scores_at_once = scores_at_once

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
        """Return output and log-sum-exp, as in `AttentionKernel`."""
        tiles = [
            self._forward(query[:, queries], key[:, keys], value[:, keys], scale, numbers)
            for queries, keys, numbers in self._tiles(query, key)
        ]
        if len(tiles) == 1:
            return tiles[0]
        return Attended(*(torch.cat(parts, dim) for parts, dim in zip(zip(*tiles, strict=True), (1, 2), strict=True)))

    def backward(
        self, output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Attended, scale: float
    ) -> Gradients:
        """Return the gradients, from weights computed again, as in `AttentionKernel`."""
        tiles = list(self._tiles(query, key))

        def of(queries: slice, keys: slice, numbers: _Numbers, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            of_tile = Attended(attended.output[:, queries], attended.log_sum_exp[:, :, queries])
            given = output_gradient[:, queries], query[:, queries], key[:, keys], value[:, keys], of_tile
            return self._backward(*given, scale, numbers, dtype)

        if len(tiles) == 1 and not tiles[0][1].start:
            return Gradients.cut(*of(*tiles[0], key.dtype))
        of_query = torch.empty_like(query)
        # Sums over tiles are in at least fp32, and rounded once.
        at_least_fp32 = torch.promote_types(key.dtype, torch.float32)
        of_key, of_value = (torch.zeros_like(each, dtype=at_least_fp32) for each in (key, value))
        for queries, keys, numbers in tiles:
            of_query[:, queries], *found = of(queries, keys, numbers, at_least_fp32)
            for total, part in zip((of_key, of_value), found, strict=True):
                total[:, keys] += part
        return Gradients.cut(of_query, of_key.to(key.dtype), of_value.to(value.dtype))

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float, numbers: _Numbers) -> Attended:
        groups, at_least_fp32 = key.shape[2], torch.promote_types(query.dtype, torch.float32)
        scores = self._scores(
            _by_group(query, groups, at_least_fp32), _by_group(key, groups, at_least_fp32), query, key
        )
        weights, log_sum_exp = _weights(scores, scale, self._window, self._softcap, value.dtype, *numbers)
        output = torch.bmm(_flat(weights), _by_group(value, groups, value.dtype))
        return Attended(_by_token(output, query, query.dtype), log_sum_exp.flatten(1, 2))

    def _backward(
        self,
        output_gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        scale: float,
        numbers: _Numbers,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries [B, N, H, D], and of keys and values [B, E, G, D] in a type."""
        groups, at_least_fp32 = key.shape[2], torch.promote_types(query.dtype, torch.float32)
        queries, keys, values, of_output = (
            _by_group(each, groups, at_least_fp32) for each in (query, key, value, output_gradient)
        )
        scores, of_weights = (self._scores(*each, query, key) for each in ((queries, keys), (of_output, values)))
        # Row sums of weights * of_weights, which equal output . output_gradient.
        row = _row_sums(output_gradient, attended.output, groups, at_least_fp32)
        log_sum_exp = attended.log_sum_exp.unflatten(1, (groups, -1))
        found = _backward(scores, scale, self._window, self._softcap, log_sum_exp, of_weights, row, *numbers)
        weights, of_scores = (_flat(each) for each in found)
        return (
            _by_token(torch.bmm(of_scores, keys), query, query.dtype),
            _by_token(torch.bmm(of_scores.transpose(1, 2), queries), key, dtype),
            _by_token(torch.bmm(weights.transpose(1, 2), of_output), value, dtype),
        )

    def _tiles(self, query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, _Numbers]]:
        """Queries and keys of each tile, and the random numbers of its mask; none without dropout."""
        rows, num_queries, heads, _ = query.shape
        at_once = tile_length(num_queries, key.shape[1], rows * heads, self._window, self._scores_at_once)
        numbers: _Numbers = ()
        if self._dropout is not None:
            numbers = self._dropout.numbers(num_queries, heads, key.shape[1], query.device)
        for queries, keys in query_tiles(num_queries, key.shape[1], self._window, at_once):
            yield queries, keys, (numbers[0][..., queries], numbers[1][keys], numbers[2]) if numbers else ()

    @staticmethod
    def _scores(rows: Tensor, columns: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Products [B, G, R, N, E] of tensors like the queries [B G, R N, D] and the keys [B G, E, D]."""
        shape = query.shape[0], key.shape[2], -1, query.shape[1], key.shape[1]
        return torch.bmm(rows, columns.transpose(1, 2)).view(shape)


def _flat(weights: Tensor) -> Tensor:
    """Weights [B, G, R, N, E] as matrices [B G, R N, E]."""
    return weights.flatten(0, 1).flatten(1, 2)


@Pointwise
def _by_group(heads: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Heads [B, N, G R, D] as matrices [B G, R N, D] of a type."""
    return heads.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).to(dtype).flatten(0, 1).flatten(1, 2)


@Pointwise
def _by_token(product: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices [B G, R N, D] as heads [B, N, G R, D] of a type, as the tensor `like` has them."""
    rows, length, heads, _ = like.shape
    groups = product.shape[0] // rows
    product = product.unflatten(0, (rows, groups)).unflatten(2, (heads // groups, length))
    return product.permute(0, 3, 1, 2, 4).to(dtype).flatten(2, 3).contiguous()


@Pointwise
def _row_sums(one: Tensor, other: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Sums [B, G, R, N] over channels of the product of two tensors [B, N, G R, D]."""
    return (one * other).sum(-1, dtype=dtype).transpose(1, 2).unflatten(1, (groups, -1))


@Pointwise
def _weights(
    scores: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    head_rows: Tensor | None = None,
    columns: Tensor | None = None,
    probability: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights [B, G, R, N, E], dropped where there are random numbers, and log-sum-exp [B, G, R, N] of the scores."""
    scores = _masked(_capped(scores * scale, softcap), window)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.unsqueeze(-1)).exp()
    if head_rows is not None:
        weights = weights * scaled_mask(head_rows, columns, probability, weights)
    return weights.to(dtype), log_sum_exp


@Pointwise
def _backward(
    scores: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    log_sum_exp: Tensor,
    of_weights: Tensor,
    row: Tensor,
    head_rows: Tensor | None = None,
    columns: Tensor | None = None,
    probability: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights as in the forward, and gradients of the scores [B, G, R, N, E].

    Args:
        log_sum_exp: [B, G, R, N].
        row: sums over each row of weights times their gradients.
        head_rows: random numbers of the queries by head; None for no dropout.
    """
    capped = _capped(scores * scale, softcap)
    weights = (_masked(capped, window) - log_sum_exp.unsqueeze(-1)).exp()
    # Of c tanh(x / c) the derivative is 1 - tanh(x / c)^2.
    slope = scale if softcap is None else scale * (1 - (capped / softcap).square())
    if head_rows is None:
        return weights, weights * (of_weights - row.unsqueeze(-1)) * slope
    mask = scaled_mask(head_rows, columns, probability, weights)
    return weights * mask, weights * (of_weights * mask - row.unsqueeze(-1)) * slope


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scaled scores between -c and c, where there is a limit c."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def _masked(scores: Tensor, window: int | None) -> Tensor:
    """Scores [..., N, E], with minus infinity for keys to which a query does not attend."""
    length, num_keys = scores.shape[-2:]
    keys = torch.arange(num_keys, device=scores.device)
    last_seen = torch.arange(num_keys - length, num_keys, device=scores.device).unsqueeze(1)
    hidden = keys > last_seen
    if window is not None:
        hidden |= keys <= last_seen - window
    return scores.masked_fill(hidden, float("-inf"))
