"""The winner with an order of its ops that is searched for, which no closed form can price.

A search compares the schedules that have one. The winner alone is then priced with `optimised`, and where the model
has an output layer of its own also with that layer in parts, one on each pipeline rank (`--vocabulary-stages`, ADR 53).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model.vocabulary_parts import why_vocabulary_stays_whole
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.placed_strategy import pipeline_shape
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.cost.simulated_time import num_searched_ops
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.strategy import Strategy

MOST_OPS = 10_000
"""Ops of an order that is searched for: more would take longer than all the rest of a search."""

WORTH_FINDING = 0.01
"""Share of the winner's time that an order must save."""


def with_found_order(
    winner: Ranked, problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]], pricing: Pricing
) -> Ranked | None:
    """Return the winner with the fastest order that is found for it; None if none saves a hundredth of its time.

    Args:
        winner: the best strategy with a schedule that needs no search.
        constraints: values that flags allow for dimensions, which stay so.
        pricing: on the cluster, in the order of its hostfile.
    """
    found = []
    for strategy in _candidates(winner.strategy, problem, constraints):
        try:
            prediction = pricing.predict(strategy)
        except (ConfigError, PlanError):
            continue  # no layers for so many stages, or no order within the memory
        if pricing.why_it_does_not_fit(strategy, prediction.memory, problem.memory_headroom) is None:
            found.append(Ranked(strategy=strategy, prediction=prediction))
    best = min(found, key=lambda entry: entry.sort_key, default=None)
    if best is None or best.iteration_time_s > (1 - WORTH_FINDING) * winner.iteration_time_s:
        return None
    return best


def _candidates(
    winner: Strategy, problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]]
) -> Iterator[Strategy]:
    """Yield the strategy with `optimised`, then with vocabulary stages, too; nothing where flags name a schedule."""
    if (
        "schedule" in constraints
        or winner.pipeline_parallel_size == 1
        or winner.offload
        or num_searched_ops(pipeline_shape(winner)) > MOST_OPS
        or problem.software.name != TERAPIPE.name
    ):
        return
    yield replace(winner, schedule=OPTIMISED)
    model = problem.workload.config
    pipeline_ranks, tensor_ranks = winner.pipeline_parallel_size, winner.tensor_parallel_size
    if model is None or why_vocabulary_stays_whole(model, pipeline_ranks=pipeline_ranks, tensor_ranks=tensor_ranks):
        return
    # Stages that were balanced around a whole output layer are not balanced without it.
    given = winner.stage_partition if "stage_partition" in constraints else "uniform"
    if given != "parameters":
        yield replace(winner, schedule=OPTIMISED, vocabulary_stages=True, stage_partition=given)
