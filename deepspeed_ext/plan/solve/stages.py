"""Uneven stages and token slices together: how many layers each stage has, so that the head's stage is not the slowest.

A language-model head costs as much as several layers. Its rank makes all others wait, in every token slice, unless it
has fewer layers. The search begins with ranks that are as equally loaded as whole layers allow, then moves single
layers between stages and tokens between token slices in turn, judged by the simulated makespan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cut_evaluation import CutEvaluation, evaluation_of
from deepspeed_ext.plan.solve.cut_grid import CutGrid
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts
from deepspeed_ext.plan.solve.token_slices import SolvedTokenSlices, check_memory, search_cuts
from deepspeed_ext.plan.text.progress_line import Progress, unseen

CostsOfLayers = Callable[[Sequence[int]], TokenSliceCosts]
"""Costs of stages with so many layers each: embedding and head included, wherever they are."""

ROUNDS = 2
MOST_SOURCES = 4
"""Stages that layers are taken from, and stages that get them, in one try: the heaviest and the lightest."""


@dataclass(frozen=True)
class SolvedStages:
    """Stages, token slices, and what they were judged by."""

    partition: StagePartition
    cut: TokenSlices
    makespan: float
    """With the schedule; see `SolvedTokenSlices`."""


def solve_stages(
    shape: PipelineShape,
    num_layers: int,
    seq_length: int,
    costs_of_layers: CostsOfLayers,
    *,
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
    granularity: int = 1,
    min_length: int = 1,
    transfer: float | TransferCosts = 0.0,
    effort: float = 1.0,
    progress: Progress = unseen,
) -> SolvedStages:
    """Find layers per stage and token slices with a short step.

    Args:
        num_layers: of the model, at least one for each stage.
        schedule: that will run; None for one that `optimise` makes.
        memory_limit: as for `solve_token_slices`; activations count as if stages were even.
        min_length: tokens that each token slice has at least.
        transfer: as `OpCosts.transfer`, with the bytes of a micro-batch.
        effort: time to take, in about three seconds of one core.
        progress: is told how much of the search is done, at most.

    Raises:
        PlanError: if there are fewer layers than stages, or as `solve_token_slices` does.
    """
    grid = CutGrid(seq_length, granularity, min_length)
    grid.check_count(shape.num_token_slices)
    even = StagePartition.uniform(num_layers, shape.num_stages)
    layers = _level([len(even.layers(stage)) for stage in range(shape.num_stages)], shape, costs_of_layers, seq_length)
    token_slice_costs = costs_of_layers(layers)
    evaluation = evaluation_of(schedule, shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)

    def searched(turn: int) -> SolvedTokenSlices:
        def of_all(share: float) -> None:
            progress((turn + share) / (ROUNDS + 1))

        return search_cuts(grid, shape.num_token_slices, evaluation, effort, progress=of_all)

    solved = searched(0)
    for turn in range(1, ROUNDS + 1):
        before = layers
        layers = _moved(layers, shape, costs_of_layers, solved.cut, evaluation)
        evaluation.change_costs(costs_of_layers(layers))
        if layers == before:
            break
        evaluation.adapt(solved.cut)
        solved = searched(turn)
    if schedule is not None and memory_limit is not None:
        check_memory(schedule, shape, solved.cut, memory_limit)
    bounds = tuple(int(bound) for bound in np.cumsum([0, *layers]))
    return SolvedStages(StagePartition(bounds), solved.cut, solved.makespan)


def _loads(layers: Sequence[int], shape: PipelineShape, costs_of_layers: CostsOfLayers, seq_length: int) -> list[float]:
    """Work of each stage for one whole sequence."""
    times = costs_of_layers(layers)(range(shape.num_stages), np.array([0]), np.array([seq_length]))
    return [float(time) for time in times.sum(axis=(0, 2))]


def _level(layers: list[int], shape: PipelineShape, costs_of_layers: CostsOfLayers, seq_length: int) -> list[int]:
    """Move layers from the rank with the most work to the one with the least, while that makes the most less."""

    def by_rank(loads: Sequence[float]) -> list[float]:
        return [sum(loads[stage] for stage in shape.stages_of(rank)) for rank in range(shape.num_ranks)]

    loads = _loads(layers, shape, costs_of_layers, seq_length)
    while True:
        work = by_rank(loads)
        heavy, light = work.index(max(work)), work.index(min(work))
        source = max(shape.stages_of(heavy), key=layers.__getitem__)
        target = min(shape.stages_of(light), key=layers.__getitem__)
        if layers[source] == 1 or heavy == light:
            return layers
        changed = list(layers)
        changed[source] -= 1
        changed[target] += 1
        loads = _loads(changed, shape, costs_of_layers, seq_length)
        if sorted(by_rank(loads), reverse=True) >= sorted(work, reverse=True):
            return layers
        layers = changed


def _moved(
    layers: list[int],
    shape: PipelineShape,
    costs_of_layers: CostsOfLayers,
    cut: TokenSlices,
    evaluation: CutEvaluation,
) -> list[int]:
    """Move single layers between stages while the step gets shorter."""
    evaluation.change_costs(costs_of_layers(layers))
    makespan = evaluation(cut)
    improved = True
    while improved:
        improved = False
        loads = _loads(layers, shape, costs_of_layers, cut.seq_length)
        by_load = sorted(range(shape.num_stages), key=loads.__getitem__)
        for source in reversed(by_load[-MOST_SOURCES:]):
            for target in by_load[:MOST_SOURCES]:
                if source == target or layers[source] == 1:
                    continue
                changed = list(layers)
                changed[source] -= 1
                changed[target] += 1
                evaluation.change_costs(costs_of_layers(changed))
                judged = evaluation(cut)
                if judged < makespan:
                    makespan, layers, improved = judged, changed, True
    return layers
