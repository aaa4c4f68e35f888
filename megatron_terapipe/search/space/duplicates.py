"""Strategies that need not be tried, because another one of the space does the same, or the same better.

A pinned value is never dropped for one that was not asked for.
"""

import numpy as np

from megatron_terapipe.search.space.choices import SOLVED
from megatron_terapipe.search.space.problem import Problem
from megatron_terapipe.search.space.rules import Holds, Rule
from megatron_terapipe.search.space.strategy_grid import StrategyGrid


def _model_chunks(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    plain = {model_chunks for schedule, model_chunks in grid.order if schedule == "1f1b"}
    interleaved = {model_chunks for schedule, model_chunks in grid.order if schedule == "interleaved"}

    def wanted(schedule: str, model_chunks: int) -> bool:
        if schedule == "interleaved":
            return model_chunks > 1 or 1 not in plain
        return model_chunks == 1 or model_chunks not in interleaved

    return grid.along("order", [wanted(*order) for order in grid.order])


def _model_chunks_reason(grid: StrategyGrid, problem: Problem) -> str:
    del problem
    if grid.order[0][0] == "interleaved":
        return "interleaved with one model chunk is 1f1b"
    return "gpipe with model chunks has interleaved's bubble and keeps more activations"


def _one_rank(grid: StrategyGrid, problem: Problem) -> Holds:
    """Without a pipeline the first schedule stands for all of the others, which keep as much or more."""
    del problem
    first = grid.order[0] if grid.order else None
    return grid.along("order", [grid.pipeline_parallel_size > 1 or order == first for order in grid.order])


def _one_rank_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "on one pipeline rank all schedules take the same time, and 1f1b keeps the fewest activations"


def _zero(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    alone = grid.data_parallel_size == 1 and 1 in grid.zero
    return grid.along("zero", [not alone or stage == 1 for stage in grid.zero])


def _zero_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "on one data-parallel rank there is no optimizer state to spread: ZeRO stage 1 stands for 0"


def _sequence_parallel(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    alone = grid.tensor_parallel_size == 1 and False in grid.sequence_parallel
    return grid.along("sequence_parallel", [not (alone and on) for on in grid.sequence_parallel])


def _sequence_parallel_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "on one tensor-parallel rank there is no other to share tokens with"


def _partition(grid: StrategyGrid, problem: Problem) -> Holds:
    """Rules that deal the layers as one before them does."""
    kept = np.ones((len(grid.order), len(grid.partition)), dtype=bool)
    for row, (_, model_chunks) in enumerate(grid.order):
        num_stages = grid.pipeline_parallel_size * model_chunks
        seen: set[tuple[int, ...]] = set()
        for column, partition in enumerate(grid.partition):
            if partition == SOLVED:
                # One stage, or one layer on each, can be dealt but one way.
                kept[row, column] = num_stages not in (1, problem.workload.num_dealt_layers) or not seen
            elif partition == "parameters" and problem.has_equal_layers and "uniform" in grid.partition:
                kept[row, column] = False
            else:
                # Bounds that are pinned may not fit these stages: the trainer's rules say so, not this one.
                bounds = partition
                if isinstance(bounds, str):
                    bounds = problem.partition(bounds, num_stages).bounds
                kept[row, column] = bounds not in seen
                seen.add(bounds)
    return kept[:, :, None, None, None, None, None]


def _partition_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "another rule deals the same layers to each stage"


DUPLICATE_RULES = (
    Rule("not the same as another schedule", _model_chunks, _model_chunks_reason),
    Rule("a pipeline, where schedules differ", _one_rank, _one_rank_reason),
    Rule("data-parallel ranks, where ZeRO stages differ", _zero, _zero_reason),
    Rule("tensor-parallel ranks to share tokens", _sequence_parallel, _sequence_parallel_reason),
    Rule("not the same stages as another partition", _partition, _partition_reason),
)
"""In the order in which rejections are counted. They need the trainer's rules to hold."""
