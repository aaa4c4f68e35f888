"""Rules that map one weight of ours to tensors of Hugging Face, and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A weight of a layer of ours, and the tensors that hold it there."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    """From our weight to theirs."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """From theirs to ours, without change of a bit."""


def same(ours: str, theirs: str) -> WeightRule:
    """Return the rule of a tensor that is equal on both sides."""
    return WeightRule(ours, (theirs,), lambda weight: (weight,), lambda tensors: tensors[0])


def vocabulary(ours: str, theirs: str, *, words: int, rows: int) -> WeightRule:
    """A row for each word; ours has more, so that ranks can share them."""

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        # As the mean of all, what pads is no likelier than a word is on average; as zeros it might be the likeliest.
        mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(rows - words, -1)])

    return WeightRule(ours, (theirs,), lambda weight: (weight[:words],), padded)


def stacked(ours: str, theirs: Sequence[str]) -> WeightRule:
    """Return the rule of a tensor here that is several tensors of one shape there, stacked along a new dimension."""
    return WeightRule(ours, tuple(theirs), lambda weight: weight.unbind(), torch.stack)


def halves(ours: str, theirs: str) -> WeightRule:
    """Return the rule of a tensor [2, n, ...] here that is [2 n, ...] there."""
    return WeightRule(
        ours, (theirs,), lambda weight: (weight.flatten(0, 1),), lambda tensors: tensors[0].unflatten(0, (2, -1))
    )


def behind_rows(ours: str, theirs: str, rows: int) -> WeightRule:
    """Return the rule of a tensor that has some rows before it there that nobody reads."""

    def longer(weight: Tensor) -> tuple[Tensor]:
        return (torch.cat([weight.new_zeros(rows, *weight.shape[1:]), weight]),)

    return WeightRule(ours, (theirs,), longer, lambda tensors: tensors[0][rows:])


@dataclass(frozen=True, slots=True)
class Heads:
    """Order of queries, keys and values in our product: for each group its query heads, its key and its value head."""

    groups: int
    heads_of_group: int
    size: int

    def apart(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of our product, each head after head: three tensors [heads x size, ...].

        Args:
            weight: [(query heads + 2 x key heads) x size, ...], group after group.
        """
        grouped = weight.unflatten(0, (self.groups, self.heads_of_group + 2, self.size))
        query, key, value = grouped.split([self.heads_of_group, 1, 1], dim=1)
        return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)

    def grouped(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the weight of our product, [(query heads + 2 x key heads) x size, ...].

        Args:
            tensors: queries, keys and values, each [heads x size, ...].
        """
        parts = [each.unflatten(0, (self.groups, -1, self.size)) for each in tensors]
        return torch.cat(parts, dim=1).flatten(0, 2)


def attention(ours: str, theirs: Sequence[str], heads: Heads) -> WeightRule:
    """Return the rule of our product of queries, keys and values, which are a tensor each there."""
    return WeightRule(ours, tuple(theirs), heads.apart, heads.grouped)


def fused_attention(ours: str, theirs: str, heads: Heads) -> WeightRule:
    """Return the rule of our product of queries, keys and values, which are one tensor there.

    All queries come first, then all keys, then all values.
    """
    rows = [heads.groups * count * heads.size for count in (heads.heads_of_group, 1, 1)]
    return WeightRule(
        ours,
        (theirs,),
        lambda weight: (torch.cat(heads.apart(weight)),),
        lambda tensors: heads.grouped(tensors[0].split(rows)),
    )


def turned(rule: WeightRule) -> WeightRule:
    """Return the rule of a weight whose matrices [out, in] here are [in, out] there; a bias stays as it is.

    Args:
        rule: the rule if they were not.
    """
    return WeightRule(
        rule.ours,
        rule.theirs,
        lambda weight: [_turned(each) for each in rule.split(weight)],
        lambda tensors: rule.join([_turned(each) for each in tensors]),
    )


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous() if weight.dim() == 2 else weight
