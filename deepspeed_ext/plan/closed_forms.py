"""Closed forms: bubble ratios where every op of a kind costs the same and transfers cost nothing; what 1f1b keeps.

P pipeline ranks, M micro-batches, S token slices, V model chunks. A bubble is as long as the ops of one token slice on
one stage for each of the P - 1 ranks that a token slice passes on its way in and out, so it shrinks with all of the
other three. tests/plan hold the simulator to these.
"""

from typing import NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.slicing import TokenSlices

__all__ = ["ClosedForm", "closed_form", "memory_of_1f1b"]


class ClosedForm(NamedTuple):
    """A bubble ratio, and the formula that gives it."""

    formula: str
    bubble_ratio: float


def closed_form(schedule: str, shape: PipelineShape, costs: OpCosts) -> ClosedForm | None:
    """Return the bubble ratio of a schedule, if it has a closed form for this shape and these costs.

    `gpipe` and `1f1b`: arXiv 2102.07988 and 2406.03488, bubble (P-1)/(MS+P-1). `interleaved`: arXiv 2104.04473 section
    2.2 for token slices, (P-1)/(VMS+P-1), if P token slices are there to fill the pipeline; `breadth-first`, arXiv
    2211.05953, has the same. `zero-bubble`: arXiv 2401.10241 section 3 for token slices, if the three parts cost the
    same.
    """
    if not _is_uniform(costs):
        return None
    warmup, units = shape.num_ranks - 1, shape.num_micro_batches * shape.num_token_slices
    if schedule in ("gpipe", "1f1b", "interleaved", "breadth-first") and shape.num_model_chunks == 1:
        return ClosedForm("(P-1)/(MS+P-1)", warmup / (units + warmup))
    round_and_round = schedule in ("interleaved", "breadth-first") and shape.placement is Placement.LOOPED
    if round_and_round and units >= shape.num_ranks:
        return ClosedForm("(P-1)/(VMS+P-1)", warmup / (shape.num_model_chunks * units + warmup))
    if schedule == "zero-bubble" and _first(costs.forward) == _first(costs.backward) == _first(costs.weight_gradient):
        makespan = 2 * units + max(units + warmup, shape.num_token_slices + 2 * warmup)
        return ClosedForm("1-3MS/(2MS+max(MS+P-1,S+2(P-1)))", 1 - 3 * units / makespan)
    return None


def memory_of_1f1b(shape: PipelineShape, token_slices: TokenSlices) -> float:
    """Return the activations that 1f1b keeps on the first rank, counted in those of one whole micro-batch on it.

    1f1b keeps P - 1 + S token slices in a row, from the first of a micro-batch on, or all that there are.

    Args:
        token_slices: lengths of the token slices.
    """
    whole, rest = divmod(shape.num_ranks - 1 + len(token_slices), len(token_slices))
    return min(shape.num_micro_batches, whole + token_slices.prefix_len(rest) / token_slices.seq_length)


def _is_uniform(costs: OpCosts) -> bool:
    tables = (costs.forward, costs.backward, costs.weight_gradient or costs.forward)
    return costs.transfer == 0 and all(len({time for row in table for time in row}) == 1 for table in tables)


def _first(table: tuple[tuple[float, ...], ...] | None) -> float | None:
    return table[0][0] if table else None
