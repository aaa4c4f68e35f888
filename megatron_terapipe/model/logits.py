"""Logits that are computed where they are needed, and never kept for a whole sequence; their cross-entropy.

The logits of a token are the widest row of a model: 131,072 words in fp32 are 64 times a hidden state of 4,096 in
bf16. So a token keeps its hidden state from forward to backward, and logits exist a tile at a time, the logits of
some tokens:

    forward     hidden --> logits of a tile --> loss of its tokens
    backward    hidden --> logits of a tile, again --> their gradient, in place --> gradients of hidden and weight

Only logits that do not fit are computed again: the logits computed last are kept for their backward, as long as all
that are alive, with the logits of the tile that is being computed, are no more than a limit. Gradients in
the forward, while the tile exists, would need the factor of each loss then, and another order of sums.

Rows of the vocabulary are padded to a multiple of 128 and of the tensor-parallel size, because such products are faster
and divide evenly. Padded rows are not in the loss, unlike in Megatron: their logits are replaced by the lowest finite
number of the type before the softmax, so their probability and gradient are exactly 0, and loss, gradients and logits
equal a vocabulary's without padding. Losses are lower than Megatron's by ln(padded / real) at the start of
training, 0.39 with the byte tokenizer, and by less later.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.pointwise import Pointwise
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks, accumulate, linear

IN_CACHE, COPIED_AT_ONCE = 1 << 17, 1 << 26
"""Logits whose copy in fp32 exists at once where no compiler makes one kernel of the operators: on CPUs, so that it
stays in a cache, and elsewhere."""


class LiveLogits:
    """The logits of one output layer that are alive, held to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tiles: deque[weakref.ref[KeptTile]] = deque()

    def tiles(self, num_tokens: int, vocabulary: int) -> list[slice]:
        """Split tokens into as few tiles of one size as the limit allows."""
        return _tiles(num_tokens, vocabulary, self.limit)

    def make_room(self, number: int) -> None:
        """Free tiles, the oldest first, until there is room for `number` logits.

        Backwards run last token slice to first, so the oldest are needed last.
        """
        kept = [tile for tile in (each() for each in self._tiles) if tile is not None and tile.logits is not None]
        alive = sum(tile.logits.numel() for tile in kept)
        while kept and alive + number > self.limit:
            oldest = kept.pop(0)
            alive -= oldest.logits.numel()
            oldest.logits = None
        self._tiles = deque(map(weakref.ref, kept))

    def keep(self, logits: Tensor) -> "KeptTile":
        """Keep a tile [tokens, vocabulary] until it is taken, its holder is gone, or its room is needed."""
        tile = KeptTile(logits)
        self._tiles.append(weakref.ref(tile))
        return tile


def _tiles(num_tokens: int, vocabulary: int, limit: int) -> list[slice]:
    count = -(-num_tokens // max(limit // vocabulary, 1))
    size = -(-num_tokens // count)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


class KeptTile:
    """Logits [tokens, vocabulary] that wait for their backward, if their room was not needed."""

    def __init__(self, logits: Tensor) -> None:
        self.logits: Tensor | None = logits

    def take(self) -> Tensor | None:
        """Give the logits away: [tokens of the tile, vocabulary]; None if they must be computed again."""
        logits, self.logits = self.logits, None
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The output of a model's last layer, from which logits are computed."""

    hidden: Tensor
    """[B, n, hidden] of the tokens this rank has between the matrices."""
    weight: Tensor
    """Of this rank's part of the vocabulary, [V / size, hidden]."""
    ranks: TensorParallelRanks
    live: LiveLogits
    words: int | None = None
    """Entries of the vocabulary of all ranks; later rows of the weight are padding, which no token can be. None =
    all rows."""
    bias: Tensor | None = None
    """Of this rank's part of the vocabulary, [V / size]; None for none."""
    multiplier: float = 1.0
    """Factor of the hidden state, and so of the logits, of which there are many more."""
    softcap: float | None = None
    """C, where the logit of a product x is c tanh(x / c)."""
    first_part: int = 0
    """Parts of the vocabulary before the parts of these ranks, where pipeline stages share it, too."""

    def of(self, hidden: Tensor) -> "Logits":
        """Return the logits [B, N, V / size] of other hidden states [B, n, hidden], with the same weight."""
        return replace(self, hidden=hidden)

    def compute(self) -> Tensor:
        """This rank's logits of all tokens, [B, N, V / size]; padding has minus infinity."""
        logits = linear(self._scaled, self.weight, self.bias, ranks=self.ranks)
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        padding = len(self.weight) - self._own_words
        return F.pad(logits[..., : self._own_words], (0, padding), value=float("-inf")) if padding else logits

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Cross-entropy of each token [B, N] in at least fp32, the same on every rank, for token ids [B, N]."""
        return _CrossEntropy.apply(self._scaled, self.weight, self.bias, targets, self.ranks, self.live, self._rule)

    def sums(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two sums over the rows of these ranks, each [B, N] in at least fp32, the same on each of them.

        The logarithm of the sum of exponentials of the logits; and the target's logit, 0 where it is another row.
        """
        return _PartSums.apply(self._scaled, self.weight, self.bias, targets, self.ranks, self.live, self._rule)

    @property
    def _scaled(self) -> Tensor:
        return self.hidden if self.multiplier == 1 else self.hidden * self.multiplier

    @property
    def _rule(self) -> "_Rule":
        return _Rule(self._own_words, self.softcap, self._first_row)

    @property
    def _first_row(self) -> int:
        """Row of the whole weight with which this rank's part begins."""
        return (self.first_part + self.ranks.rank) * len(self.weight)

    @property
    def _own_words(self) -> int:
        """Rows of this rank's part of the weight that are words."""
        rows = len(self.weight)
        return rows if self.words is None else min(max(self.words - self._first_row, 0), rows)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How logits follow from the products of a tile, in place."""

    words: int
    """Columns that are words; later ones are padding."""
    softcap: float | None
    first_row: int = 0
    """Row of the whole weight that the first column is of."""

    def logits(self, products: Tensor) -> Tensor:
        """The logits [tokens, V / size] of products, which they take the place of."""
        if self.softcap is not None:
            _cap(products, self.softcap)
        # Not minus infinity: on a rank with padding only, the difference of two would be NaN.
        return self.padded(products, torch.finfo(products.dtype).min)

    def padded(self, columns: Tensor, value: float) -> Tensor:
        """Columns [tokens, V / size], padding overwritten with a value."""
        if self.words < columns.shape[-1]:
            columns[:, self.words :] = value
        return columns


class _CrossEntropy(torch.autograd.Function):
    """The output layer's product and its loss, in one.

    The gradient of a logit is `p - 1` for the target and `p` for others, `p` its probability: its exponential over the
    sum of all. A rank has a part of the vocabulary, so three numbers per token travel, whatever the number of tiles,
    instead of logits (arXiv 1909.08053 section 3): the largest logit, the sum, and the logit of the target.

    The gradient of the weight is computed at once, also where a schedule defers others: it needs the gradient of the
    logits, which must not be kept.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ranks: TensorParallelRanks, live: LiveLogits, rule: _Rule):
        largest, total, of_target = _sums(ctx, hidden, weight, bias, targets, ranks, live, rule, is_part=ranks.size > 1)
        return (largest - of_target).add_(total.log()).view_as(targets)

    @staticmethod
    def backward(ctx, output_gradient):
        return *_gradients(ctx, output_gradient, output_gradient.neg()), None, None, None, None


class _PartSums(torch.autograd.Function):
    """The output layer's product with some rows of its weight, and the two sums of `Logits.sums`, in one.

    Sums of several parts of a vocabulary give the loss: a stage adds its own to those before (arXiv 2411.05288).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, ranks: TensorParallelRanks, live: LiveLogits, rule: _Rule):
        largest, total, of_target = _sums(ctx, hidden, weight, bias, targets, ranks, live, rule, is_part=True)
        return (largest + total.log()).view_as(targets), of_target.view_as(targets)

    @staticmethod
    def backward(ctx, of_log_sum, of_target):
        return *_gradients(ctx, of_log_sum, of_target), None, None, None, None


def _sums(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ranks: TensorParallelRanks,
    live: LiveLogits,
    rule: _Rule,
    *,
    is_part: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of the exponentials of the logits less the largest, and the target's logit, each [tokens, 1].

    Args:
        is_part: whether there are other rows of the weight, with targets that are not of these: their logit is 0.
    """
    rows = (ranks.start_gather(hidden)() if ranks.sequence_parallel else hidden).flatten(0, -2)
    own, elsewhere = targets.reshape(-1, 1), None
    if is_part:
        own = own - rule.first_row
        elsewhere = (own < 0) | (own >= len(weight))
        own = own.masked_fill(elsewhere, 0)
    found, of_own_rows, ctx.kept = [], [], []
    ctx.tiles = live.tiles(len(rows), len(weight))
    for tile in ctx.tiles:
        live.make_room((tile.stop - tile.start) * len(weight))
        logits = rule.logits(F.linear(rows[tile], weight, bias))
        found += [_exponentials(logits[part]) for part in _parts(logits)]
        of_own_rows.append(logits.gather(-1, own[tile]))
        ctx.kept.append(live.keep(logits) if any(ctx.needs_input_grad) else None)
        del logits
    largest, total = map(_joined, zip(*found, strict=True))
    of_own = _joined(of_own_rows).to(total.dtype)
    of_target = of_own if elsewhere is None else of_own.masked_fill(elsewhere, 0)
    if ranks.size > 1:
        of_these, largest = largest, largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        sums = torch.stack(((of_these - largest).exp_().mul_(total), of_target))
        dist.all_reduce(sums, group=ranks.group)
        total, of_target = sums.unbind()
    ctx.save_for_backward(hidden, weight, bias, own, elsewhere, largest, total, of_own)
    ctx.parameter, ctx.ranks, ctx.live, ctx.rule = weight, ranks, live, rule
    return largest, total, of_target


def _gradients(ctx: Any, of_log_sum: Tensor, of_target: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of hidden state, weight and bias, from those [B, N] of the logarithm of the sum and the target's logit.

    The gradients of logits take the place of the logits.
    """
    hidden, weight, bias, own, elsewhere, largest, total, of_own = ctx.saved_tensors
    ranks, rule = ctx.ranks, ctx.rule
    factor, of_target = of_log_sum.reshape(-1, 1) / total, of_target.reshape(-1, 1)
    if elsewhere is not None:
        of_target = of_target.masked_fill(elsewhere, 0)
    at_own = torch.addcmul(of_target, (of_own - largest).exp_(), factor)
    if rule.softcap is not None:
        at_own *= _slope(of_own, rule.softcap)
    at_own = at_own.to(weight.dtype)
    rows = (ranks.start_gather(hidden)() if ranks.sequence_parallel else hidden).flatten(0, -2)
    of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
    of_hidden = of_weight = None
    of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
    for tile, kept in reversed(list(zip(ctx.tiles, ctx.kept, strict=True))):
        logits = kept.take()
        if logits is None:
            ctx.live.make_room((tile.stop - tile.start) * len(weight))
            logits = rule.logits(F.linear(rows[tile], weight, bias))
        for part in _parts(logits):
            _to_gradient(logits[part], largest[tile][part], factor[tile][part], rule.softcap)
        rule.padded(logits.scatter_(-1, own[tile], at_own[tile]), 0)
        if of_rows is not None:
            torch.mm(logits, weight, out=of_rows[tile])
            if tile.start == 0:
                # The first tile comes last: the sum over ranks runs during its other product.
                of_hidden = ranks.start_complete(of_rows.view(len(hidden), -1, hidden.shape[-1]))
        if ctx.needs_input_grad[1]:
            of_weight = accumulate(ctx.parameter, logits, rows[tile], of_weight)
        if of_bias is not None:
            of_bias += logits.sum(0)
        del logits
    return None if of_hidden is None else of_hidden(), of_weight, of_bias


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parts(logits: Tensor) -> list[slice]:
    """Rows of logits [tokens, vocabulary] that are in work at once: all where no operator makes a copy in fp32."""
    if _exponentials.is_compiled_on(logits.device):
        return [slice(None)]
    return _tiles(*logits.shape, IN_CACHE if logits.device.type == "cpu" else COPIED_AT_ONCE)


@Pointwise
def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit, and sum of the exponentials of the logits less the largest, [tokens, 1] in at least fp32.

    Torch's compiler finds both in one pass over logits in this order of operators.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.amax(-1, keepdim=True)
    return largest, (logits - largest).exp_().sum(-1, keepdim=True)


@Pointwise
def _to_gradient(logits: Tensor, largest: Tensor, factor: Tensor, softcap: float | None) -> None:
    """Put the gradients of products in place of their logits: exponentials less the largest, times a factor."""
    gradient = logits.to(largest.dtype)
    slope = None if softcap is None else _slope(gradient, softcap)
    gradient.sub_(largest).exp_().mul_(factor)
    if slope is not None:
        gradient.mul_(slope)
    logits.copy_(gradient)


@Pointwise
def _cap(products: Tensor, softcap: float) -> None:
    """Put logits in place of products."""
    products.div_(softcap).tanh_().mul_(softcap)


def _slope(logits: Tensor, softcap: float) -> Tensor:
    """Derivative of logits by their products."""
    return (logits / softcap).square_().neg_().add_(1)
