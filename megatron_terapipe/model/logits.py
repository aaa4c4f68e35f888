"""Logits that are computed where they are needed, and never kept for a whole sequence; their cross-entropy.

The logits of a token are the widest row of a model: 131,072 words in fp32 are 64 times a hidden state of 4,096 in
bf16. So a token keeps its hidden state from forward to backward, and logits exist a tile at a time, which are those of
some tokens:

    forward     hidden --> logits of a tile --> loss of its tokens
    backward    hidden --> logits of a tile, again --> their gradient --> gradients of hidden and weight

Only logits that do not fit are computed again: the logits computed last are kept for their backward, as long as all
that are alive, with those of the tile that is being computed, are no more than a limit. Gradients in
the forward, while the tile exists, would need the factor of each loss then, and another order of sums.

Rows of the vocabulary are padded to a multiple of 128 and of the tensor-parallel size, because such products are faster
and divide evenly. Padded rows are not in the loss, unlike in Megatron: their logits are replaced by the lowest finite
number of the type before the softmax, so their probability and gradient are exactly 0, and loss, gradients and logits
are those of the vocabulary without padding. Losses are lower than Megatron's by ln(padded / real) at the start of
training, 0.39 with the byte tokenizer, and by less later.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_terapipe.model.tensor_parallel import TensorParallelRanks, accumulate, linear


class LiveLogits:
    """The logits of one output layer that are alive, held to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._tiles: deque[weakref.ref[KeptTile]] = deque()

    def tiles(self, num_tokens: int, vocabulary: int) -> list[slice]:
        """Split tokens into as few tiles of one size as the limit allows."""
        count = -(-num_tokens // max(self.limit // vocabulary, 1))
        size = -(-num_tokens // count)
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

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
    """The ranks that share the vocabulary."""
    live: LiveLogits
    """Those of the layer that are alive."""
    words: int | None = None
    """Entries of the vocabulary of all ranks; later rows of the weight are padding, which no token can be. None =
    all rows."""
    softcap: float | None = None
    """C, where the logit of a product x is c tanh(x / c)."""
    first_part: int = 0
    """Parts of the vocabulary before those of these ranks, where pipeline stages share it, too."""

    def compute(self) -> Tensor:
        """This rank's logits of all tokens, [B, N, V / size]; those of padding are minus infinity."""
        logits = linear(self.hidden, self.weight, ranks=self.ranks)
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        padding = len(self.weight) - self._own_words
        return F.pad(logits[..., : self._own_words], (0, padding), value=float("-inf")) if padding else logits

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """Cross-entropy of each token [B, N] in at least fp32, the same on every rank, for token ids [B, N]."""
        return _CrossEntropy.apply(self.hidden, self.weight, targets, self.ranks, self.live, self._rule)

    def sums(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two sums over the rows of these ranks, each [B, N] in at least fp32, the same on each of them.

        The logarithm of the sum of exponentials of the logits; and the target's logit, 0 where it is another row.
        """
        return _PartSums.apply(self.hidden, self.weight, targets, self.ranks, self.live, self._rule)

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
    """Limit of the logits; None for none."""
    first_row: int = 0
    """Row of the whole weight that the first column is of."""

    def logits(self, products: Tensor) -> Tensor:
        """The logits [tokens, V / size] of products, which they take the place of."""
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)
        # Not minus infinity: on a rank with padding only, the difference of two would be NaN.
        products[:, self.words :] = torch.finfo(products.dtype).min
        return products

    def slope(self, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Derivative of logits [tokens, V / size] by their products, in place where types allow it; None if it is 1."""
        if self.softcap is None:
            return None
        return logits.to(dtype).div_(self.softcap).square_().neg_().add_(1)


class _CrossEntropy(torch.autograd.Function):
    """The output layer's product and its loss, in one.

    The gradient of a logit is `p - 1` for the target and `p` for others, `p` its probability. A rank has a part of the
    vocabulary, so its own softmax gives `p` once it is multiplied by the part's share of the whole sum: two numbers per
    token travel, whatever the number of tiles, instead of logits (arXiv 1909.08053 section 3).

    The gradient of the weight is computed at once, also where a schedule defers others: it needs the gradient of the
    logits, which must not be kept.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, ranks: TensorParallelRanks, live: LiveLogits, rule: _Rule):
        rows = (ranks.start_gather(hidden)() if ranks.sequence_parallel else hidden).flatten(0, -2)
        own = targets.flatten() - rule.first_row if ranks.size > 1 else targets.flatten()
        elsewhere = (own < 0) | (own >= len(weight)) if ranks.size > 1 else None
        own = (own if elsewhere is None else own.masked_fill(elsewhere, 0)).unsqueeze(-1)
        parts = _tiled(ctx, rows, weight, own, live, rule, _sums if ranks.size > 1 else _losses)
        losses, share = (parts[0], None) if ranks.size == 1 else _over_ranks(*parts, elsewhere, ranks)
        ctx.save_for_backward(hidden, weight, own, elsewhere, share)
        ctx.parameter, ctx.ranks, ctx.live, ctx.rule = weight, ranks, live, rule
        return losses.view_as(targets)

    @staticmethod
    def backward(ctx, output_gradient):
        hidden, weight, own, elsewhere, share = ctx.saved_tensors
        above = output_gradient.flatten().unsqueeze(-1)
        of_each = above if share is None else above * share
        of_target = above.neg() if elsewhere is None else above.masked_fill(elsewhere.unsqueeze(-1), 0).neg_()
        return *_of_products(ctx, hidden, weight, own, of_each, of_target), None, None, None, None


class _PartSums(torch.autograd.Function):
    """The output layer's product with some rows of its weight, and the two sums of `Logits.sums`, in one.

    Sums of several parts of a vocabulary give the loss: a stage adds its own to those before (arXiv 2411.05288).
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, ranks: TensorParallelRanks, live: LiveLogits, rule: _Rule):
        rows = (ranks.start_gather(hidden)() if ranks.sequence_parallel else hidden).flatten(0, -2)
        own = targets.flatten() - rule.first_row
        elsewhere = (own < 0) | (own >= len(weight))
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        largest, log_sum, of_target = _tiled(ctx, rows, weight, own, live, rule, _sums)
        of_target = of_target.masked_fill(elsewhere, 0)
        log_sum, share = largest + log_sum, None
        if ranks.size > 1:
            own_sum = log_sum
            log_sum = _log_sum_over_ranks(own_sum, ranks)
            share = (own_sum - log_sum).exp_().unsqueeze(-1)
            dist.all_reduce(of_target, group=ranks.group)
        ctx.save_for_backward(hidden, weight, own, elsewhere, share)
        ctx.parameter, ctx.ranks, ctx.live, ctx.rule = weight, ranks, live, rule
        return log_sum.view_as(targets), of_target.view_as(targets)

    @staticmethod
    def backward(ctx, of_log_sum, of_target):
        hidden, weight, own, elsewhere, share = ctx.saved_tensors
        of_each = of_log_sum.flatten().unsqueeze(-1)
        of_target = of_target.flatten().masked_fill(elsewhere, 0).unsqueeze(-1)
        if share is not None:
            of_each = of_each * share
        return *_of_products(ctx, hidden, weight, own, of_each, of_target), None, None, None, None


def _tiled(
    ctx: Any,
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    live: LiveLogits,
    rule: _Rule,
    compute: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Results of `compute` for the logits of all tokens, each [tokens]; tiles are kept for the backward."""
    found, ctx.kept = [], []
    ctx.tiles = live.tiles(len(rows), len(weight))
    for tile in ctx.tiles:
        live.make_room((tile.stop - tile.start) * len(weight))
        logits = rule.logits(F.linear(rows[tile], weight))
        found.append(compute(logits, targets[tile]))
        ctx.kept.append(live.keep(logits) if any(ctx.needs_input_grad) else None)
        del logits
    return [each[0] if len(found) == 1 else torch.cat(each) for each in zip(*found, strict=True)]


def _of_products(
    ctx: Any, hidden: Tensor, weight: Tensor, own: Tensor, of_each: Tensor, of_target: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden state and weight.

    Args:
        hidden: [B, n, hidden].
        weight: [rows, hidden] of this rank.
        own: [tokens, 1], row of the target.
        of_each: [tokens, 1], gradient of a logit over its probability among those of this rank.
        of_target: [tokens, 1], added to the gradient of the target's logit.
    """
    ranks: TensorParallelRanks = ctx.ranks
    rows = (ranks.start_gather(hidden)() if ranks.sequence_parallel else hidden).flatten(0, -2)
    of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
    of_hidden = of_weight = None
    for tile, kept in reversed(list(zip(ctx.tiles, ctx.kept, strict=True))):
        logits = kept.take()
        if logits is None:
            ctx.live.make_room((tile.stop - tile.start) * len(weight))
            logits = ctx.rule.logits(F.linear(rows[tile], weight))
        gradient = torch.softmax(logits, -1, dtype=of_each.dtype)
        slope = ctx.rule.slope(logits, gradient.dtype)
        del logits
        gradient.mul_(of_each[tile]).scatter_add_(-1, own[tile], of_target[tile])
        if slope is not None:
            gradient.mul_(slope)
            del slope
        gradient[:, ctx.rule.words :] = 0
        gradient = gradient.to(weight.dtype)
        if of_rows is not None:
            torch.mm(gradient, weight, out=of_rows[tile])
            if tile.start == 0:
                # The first tile comes last: the sum over ranks runs during its other product.
                of_hidden = ranks.start_complete(of_rows.view(len(hidden), -1, hidden.shape[-1]))
        if ctx.needs_input_grad[1]:
            of_weight = accumulate(ctx.parameter, gradient, rows[tile], of_weight)
        del gradient
    return None if of_hidden is None else of_hidden(), of_weight


def _at_least_fp32(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor]:
    """Cross-entropy [tokens] of one rank that has the whole vocabulary; targets are [tokens, 1]."""
    return (F.log_softmax(logits, -1, dtype=_at_least_fp32(logits)).gather(-1, targets).squeeze(-1).neg_(),)


def _sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, logarithm of the sum of exponentials of the logits less the largest, and the target's logit."""
    largest, where = logits.max(-1, keepdim=True)
    log_probabilities = F.log_softmax(logits, -1, dtype=_at_least_fp32(logits))
    # That of the largest is 0 less the logarithm sought.
    log_sum = log_probabilities.gather(-1, where).neg_()
    columns = (largest.to(log_sum.dtype), log_sum, logits.gather(-1, targets).to(log_sum.dtype))
    return tuple(column.squeeze(-1) for column in columns)


def _log_sum_over_ranks(own: Tensor, ranks: TensorParallelRanks) -> Tensor:
    """Logarithm [tokens] of the sum of exponentials over all ranks, from that of each."""
    of_all = own.clone()
    dist.all_reduce(of_all, dist.ReduceOp.MAX, group=ranks.group)
    total = (own - of_all).exp_()
    dist.all_reduce(total, group=ranks.group)
    return total.log_().add_(of_all)


def _over_ranks(
    largest: Tensor, log_sum: Tensor, of_target: Tensor, elsewhere: Tensor, ranks: TensorParallelRanks
) -> tuple[Tensor, Tensor]:
    """Losses [tokens], and the share [tokens, 1] of the sum of exponentials of this rank's vocabulary."""
    of_all = largest.clone()
    dist.all_reduce(of_all, dist.ReduceOp.MAX, group=ranks.group)
    own_sum = (largest - of_all).exp_() * log_sum.exp()
    sums = torch.stack((own_sum, (of_target - of_all).masked_fill_(elsewhere, 0)))
    dist.all_reduce(sums, group=ranks.group)
    total, of_target = sums.unbind()
    return total.log() - of_target, (own_sum / total).unsqueeze(-1)
