"""Op costs from one number: the share of a layer's forward that is attention.

Attention of a token grows with the tokens before it, matrix products do not. With the whole sequence as 1 and token
slice j as [start, end) of it, on one pipeline rank, whose forward of one micro-batch takes 1:

    F  = (1 - rho) (end - start) +     rho (end^2 - start^2)
    BI = (1 - rho) (end - start) + 2 * rho (end^2 - start^2)        attention has two products to take back for each
    BW = (1 - rho) (end - start)                                    attention has no weights

In a sliding window of w of the sequence, a token at x attends to min(x, w). The squares above are then the integral of
2 min(x, w), in shares of that of a whole sequence, so that rho stays the share of attention.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from deepspeed_ext.plan.costs.op_costs import OpCosts, Table
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape

__all__ = ["attention_costs"]


def attention_costs(
    shape: PipelineShape,
    lengths: Sequence[float],
    attention_share: float,
    *,
    head_share: float = 0.0,
    window: float | None = None,
) -> OpCosts:
    """Costs of a pipeline whose layers are spread evenly, in forwards of one micro-batch on one pipeline rank.

    Args:
        shape: of the pipeline. With V model chunks each stage takes 1/V of a rank's time.
        lengths: of the token slices, in tokens or in any other unit.
        attention_share: rho above, of a whole sequence, in [0, 1].
        head_share: what the language-model head adds to F, BI and BW of the last stage, each, for a whole sequence.
        window: sliding window of all layers, in the unit of the lengths; None = tokens attend to all before them.

    Raises:
        PlanError: if there are not as many lengths as token slices, or a share or length cannot be.
    """
    if len(lengths) != shape.num_token_slices or not all(0 < length < inf for length in lengths):
        raise PlanError(
            f"lengths {list(lengths)} for {shape.num_token_slices} token slices: give one above 0 for each of them"
        )
    if not 0 <= attention_share <= 1:
        raise PlanError(f"attention share {attention_share} is not a share: give a number between 0 and 1")
    if not 0 <= head_share < inf:
        raise PlanError(f"head share {head_share} is not a share of a rank's forward: give 0 or more")
    if window is not None and not 0 < window < inf:
        raise PlanError(f"a window of {window} is none: give more than 0 tokens, or leave it out")
    whole = sum(lengths)
    reach = 1.0 if window is None else min(window / whole, 1.0)
    bounds = list(pairwise(length / whole for length in accumulate(lengths, initial=0.0)))

    def table(attention: float) -> Table:
        """Times of an op that does its matrix products once and its attention `attention` times."""
        linear = [end - start for start, end in bounds]
        squares = [_attended(end, reach) - _attended(start, reach) for start, end in bounds]
        layers = tuple(
            ((1 - attention_share) * tokens + attention * attention_share * square) / shape.num_model_chunks
            for tokens, square in zip(linear, squares, strict=True)
        )
        last = tuple(time + head_share * tokens for time, tokens in zip(layers, linear, strict=True))
        return (*[layers] * shape.last_stage, last)

    return OpCosts(table(1.0), table(2.0), table(0.0))


def _attended(end: float, reach: float) -> float:
    """Return the positions that all tokens before `end` attend to, in those of a whole sequence, 1 long.

    Args:
        end: place in the sequence, in [0, 1].
        reach: of a sliding window, in (0, 1].
    """
    # The integral of min(x, reach) from 0 to `end`, twice.
    inside, beyond = min(end, reach), max(end - reach, 0.0)
    return (inside**2 + 2 * reach * beyond) / (reach**2 + 2 * reach * (1 - reach))
