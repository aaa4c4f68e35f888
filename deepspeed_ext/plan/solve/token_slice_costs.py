"""Costs of a token slice with any start and end, as the solvers ask for them.

`TokenSliceCosts` is any function; `PolynomialCosts` is one with three coefficients per stage and kind of op,

    time(start, end) = fixed + linear (end - start) + quadratic (end^2 - start^2),

where `fixed` is what every op costs however short it is (so cutting is never free), `linear` are matrix products, and
`quadratic` is attention to the tokens before. The same three terms fit measured times of fused attention and of GPUs
that need long token slices to be busy: t(l, c) of TeraPipe (arXiv 2102.07988 section 3.3) with l = end - start,
c = start has no others, but for a product l c that is in end^2 - start^2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from deepspeed_ext.plan.costs import OpCosts, Table
from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.optimise.problem import Numbers
from deepspeed_ext.plan.slicing import TokenSlices

NUM_TERMS = 3


class TokenSliceCosts(Protocol):
    """Times of token slices on stages."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """Times of F, BI and BW of token slices [start, end).

        Args:
            starts: first tokens, an array of any shape.
            ends: tokens behind the last, an array of the same shape.

        Returns:
            [3, stages, *shape of starts].
        """
        ...


@dataclass(frozen=True, eq=False)
class PolynomialCosts:
    """Costs in three terms."""

    coefficients: Numbers
    """[3 kinds, N stages, 3 terms] fixed, linear, quadratic; lengths in tokens."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """See `TokenSliceCosts`."""
        terms = np.stack([np.ones(starts.shape), ends - starts, ends**2.0 - starts**2.0])
        return np.tensordot(self.coefficients[:, list(stages)], terms, axes=1)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[int],
        seq_length: int,
        attention_share: float,
        *,
        layer_time: float = 1.0,
        fixed: float = 0.0,
        head_time: float = 0.0,
        embedding_time: float = 0.0,
    ) -> "PolynomialCosts":
        """Costs of stages of equal layers, by the share of attention as in `attention_costs`.

        Args:
            fixed: what each op costs besides, on each stage.
            head_time: F, BI and BW, each, of the language-model head, which is on the last stage.
            embedding_time: F and BW, each, of the embedding, which is on the first stage and needs no BI.
        """
        coefficients = np.zeros((3, len(layers), NUM_TERMS))
        coefficients[..., 0] = fixed
        linear = (1 - attention_share) * layer_time / seq_length
        quadratic = attention_share * layer_time / seq_length**2
        coefficients[..., 1] = linear * np.array(layers)
        coefficients[..., 2] = quadratic * np.outer([1, 2, 0], layers)
        coefficients[:, -1, 1] += head_time / seq_length
        coefficients[(0, 2), 0, 1] += embedding_time / seq_length
        return cls(coefficients)


def op_costs(
    shape: PipelineShape, cut: TokenSlices, token_slice_costs: TokenSliceCosts, transfer: float | TransferCosts = 0.0
) -> OpCosts:
    """Costs of the ops of a pipeline that runs a cut.

    Args:
        transfer: as `OpCosts.transfer`; the bytes of a micro-batch are dealt out to the token slices by length.
    """
    starts, ends = bounds_of(cut)
    forward, backward, weight_gradient = token_slice_costs(range(shape.num_stages), starts, ends).tolist()
    if isinstance(transfer, TransferCosts):
        each = sum(transfer.message_bytes) / cut.seq_length
        transfer = replace(transfer, message_bytes=tuple(each * length for length in cut.lengths))
    return OpCosts(_table(forward), _table(backward), _table(weight_gradient), transfer)


def _table(rows: Sequence[Sequence[float]]) -> Table:
    return tuple(map(tuple, rows))


def bounds_of(cut: TokenSlices) -> tuple[Numbers, Numbers]:
    """Return the first token and the end of each token slice of a cut: two arrays of [S]."""
    ends = np.cumsum(cut.lengths)
    return ends - np.array(cut.lengths), ends
