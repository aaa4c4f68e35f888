"""The predicted timeline of a strategy, small enough to be drawn."""

from dataclasses import replace

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.timeline import Timeline
from megatron_terapipe.strategy import Strategy

MOST_OPS = 12_000
"""Ops that are drawn at most: a page of them is 2 MB and opens at once."""


def timeline_of(strategy: Strategy, costs: OpCosts) -> tuple[Timeline, str] | None:
    """Play the schedule of a strategy.

    Args:
        strategy: what to draw.
        costs: times of its ops in seconds.

    Returns:
        The timeline, with fewer micro-batches where all of them are too many to draw, and a line that says so (empty
        otherwise); None if the schedule is none of those that have a name.
    """
    if strategy.schedule not in SCHEDULES:
        return None
    num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    each = num_stages * strategy.num_token_slices * (3 if costs.weight_gradient is not None else 2)
    # Enough to fill the pipeline and to see it steady.
    fewest = min(strategy.num_micro_batches, 2 * strategy.pipeline_parallel_size)
    drawn = max(fewest, min(strategy.num_micro_batches, MOST_OPS // each))
    shape = PipelineShape(num_stages, drawn, strategy.num_token_slices, strategy.num_model_chunks)
    timeline = simulate(rank_orders(schedule_named(strategy.schedule), shape), shape, costs)
    note = (
        ""
        if drawn == strategy.num_micro_batches
        else f"{drawn} of {strategy.num_micro_batches} micro-batches are drawn"
    )
    return replace(timeline, unit="s"), note
