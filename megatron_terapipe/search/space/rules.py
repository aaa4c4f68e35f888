"""What the trainer cannot run: named rules over grids of strategies, each with the reason it gives.

A rule says of a whole grid which strategies keep it, by an array that broadcasts over the grid: of one value if it is
about the layout of the ranks, along one axis if about one more dimension, along two if about a pair. Of a grid of one
strategy it also says in words what is wrong with it.

They mirror the checks of the trainer (`megatron_terapipe/config`); tests hold them against each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.space.choices import RECOMPUTE, SOLVED
from megatron_terapipe.search.space.problem import Problem
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Holds = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """A rule that strategies keep.

    Attributes:
        name: for the funnel, as short as a line of a table wants it.
        holds: which strategies of a grid keep it.
        reason: what is wrong with the one strategy of a grid that does not.
    """

    name: str
    holds: Callable[[StrategyGrid, Problem], Holds]
    reason: Callable[[StrategyGrid, Problem], str]


def _devices(grid: StrategyGrid, problem: Problem) -> Holds:
    return _one(grid.world_size <= problem.cluster.num_devices)


def _devices_reason(grid: StrategyGrid, problem: Problem) -> str:
    return (
        f"data x tensor x pipeline parallel size = {grid.world_size} ranks, but the cluster has "
        f"{problem.cluster.num_devices} devices"
    )


def _shared_numbers(problem: Problem) -> dict[str, set[int]]:
    """Numbers that tensor-parallel ranks share, by what they are."""
    shared: dict[str, set[int]] = {"attention heads": set(), "key and value heads": set(), "columns": set()}
    for layer in {id(each): each for each in problem.workload.layers}.values():
        if layer.attention is not None:
            shared["attention heads"].add(layer.attention.query_heads)
            shared["key and value heads"].add(layer.attention.key_value_heads)
        if layer.kind == "head":
            continue  # the vocabulary is padded
        for product in layer.products:
            if product.parallel != "none":
                shared["columns"].add(product.outputs if product.parallel == "column" else product.inputs)
    return shared


def _tensor_shares(grid: StrategyGrid, problem: Problem) -> Holds:
    return _one(_unshared(grid, problem) is None)


def _unshared(grid: StrategyGrid, problem: Problem) -> tuple[str, int] | None:
    size = grid.tensor_parallel_size
    for name, numbers in _shared_numbers(problem).items():
        for number in sorted(numbers):
            if number % size:
                return name, number
    return None


def _tensor_shares_reason(grid: StrategyGrid, problem: Problem) -> str:
    found = _unshared(grid, problem)
    assert found is not None
    name, number = found
    words = f"{number} {name}" if name != "columns" else f"a matrix of {number} columns"
    return f"{words} cannot be shared by {grid.tensor_parallel_size} tensor-parallel ranks"


def _measured(grid: StrategyGrid, problem: Problem) -> Holds:
    times = [layer.forward_s for layer in problem.workload.layers if layer.forward_s is not None]
    return _one(all(grid.tensor_parallel_size in each for each in times))


def _measured_reason(grid: StrategyGrid, problem: Problem) -> str:
    return f"layers were not measured with tensor-parallel size {grid.tensor_parallel_size}"


def _layers(grid: StrategyGrid, problem: Problem) -> Holds:
    return np.asarray(grid.pipeline_parallel_size * grid.model_chunks <= problem.workload.num_dealt_layers)


def _layers_reason(grid: StrategyGrid, problem: Problem) -> str:
    stages = grid.pipeline_parallel_size * grid.order[0][1]
    return f"{stages} stages are more than the {problem.workload.num_dealt_layers} layers"


def _schedule(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    return grid.along("order", [_schedule_error(grid.pipeline_parallel_size, *order) is None for order in grid.order])


def _schedule_error(pipeline_parallel_size: int, schedule: str, model_chunks: int) -> str | None:
    if schedule not in SCHEDULES:
        return f"schedule {schedule!r} is none that can be priced: choose one of {', '.join(SCHEDULES)}"
    try:
        # A schedule says itself which pipelines it is for.
        next(SCHEDULES[schedule](PipelineShape(pipeline_parallel_size * model_chunks, 1, 1, model_chunks), 0), None)
    except PlanError as error:
        return str(error)
    return None


def _schedule_reason(grid: StrategyGrid, problem: Problem) -> str:
    del problem
    return str(_schedule_error(grid.pipeline_parallel_size, *grid.order[0]))


def _batch(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    sequences = [grid.global_batch_size % (size * grid.data_parallel_size) == 0 for size in grid.micro_batch]
    return grid.along("micro_batch", sequences)


def _batch_reason(grid: StrategyGrid, problem: Problem) -> str:
    del problem
    return (
        f"global batch size {grid.global_batch_size} is not a multiple of micro-batch size {grid.micro_batch[0]} x "
        f"data-parallel size {grid.data_parallel_size}"
    )


def _can_cut(grid: StrategyGrid, problem: Problem) -> Holds:
    can_cut = problem.workload.can_cut_tokens
    return grid.along("token_slices", [count == 1 or can_cut for count in grid.token_slices])


def _can_cut_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "a layer of the model sees other tokens than its neighbours, or later ones, so sequences cannot be cut"


def _token_slices(grid: StrategyGrid, problem: Problem) -> Holds:
    rows = [
        [_cut_error(grid, problem, count, parallel) is None for parallel in grid.sequence_parallel]
        for count in grid.token_slices
    ]
    pairs = np.array(rows, dtype=bool).reshape(len(grid.token_slices), len(grid.sequence_parallel))
    return pairs[None, None, None, :, None, :, None]


def _cut_error(grid: StrategyGrid, problem: Problem, count: int, sequence_parallel: bool) -> str | None:
    seq_length, size = problem.workload.seq_length, grid.tensor_parallel_size if sequence_parallel else 1
    if count * size > seq_length:
        each = f" of at least {size} tokens, one for each tensor-parallel rank," if size > 1 else ""
        return f"{count} token slices{each} are too many for {seq_length} tokens"
    if grid.lengths is not None and sum(grid.lengths) != seq_length:
        return f"token slices of {sum(grid.lengths)} tokens do not cover sequences of {seq_length}"
    lengths = grid.lengths or (seq_length,)
    if any(length % size for length in lengths):
        return f"sequence parallelism deals each token slice to {size} ranks, and one is no multiple of {size} tokens"
    return None


def _token_slices_reason(grid: StrategyGrid, problem: Problem) -> str:
    return str(_cut_error(grid, problem, grid.token_slices[0], grid.sequence_parallel[0]))


def _partition(grid: StrategyGrid, problem: Problem) -> Holds:
    rows = [
        [_partition_error(grid, problem, model_chunks, rule) is None for rule in grid.partition]
        for _, model_chunks in grid.order
    ]
    pairs = np.array(rows, dtype=bool).reshape(len(grid.order), len(grid.partition))
    return pairs[:, :, None, None, None, None, None]


def _partition_error(
    grid: StrategyGrid, problem: Problem, model_chunks: int, partition: str | tuple[int, ...]
) -> str | None:
    num_stages = grid.pipeline_parallel_size * model_chunks
    if isinstance(partition, str) and partition in ("uniform", "parameters", SOLVED):
        return None  # there is a layer for each stage: another rule
    try:
        problem.workload.partition(partition, num_stages)
    except ConfigError as error:
        return str(error).removeprefix("strategy: ")
    return None


def _partition_reason(grid: StrategyGrid, problem: Problem) -> str:
    return str(_partition_error(grid, problem, grid.order[0][1], grid.partition[0]))


def _recompute(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    return grid.along("recompute", [mode in RECOMPUTE for mode in grid.recompute])


def _recompute_reason(grid: StrategyGrid, problem: Problem) -> str:
    del problem
    return f"recompute {grid.recompute[0]!r} is not one of {', '.join(RECOMPUTE)}"


def _zero(grid: StrategyGrid, problem: Problem) -> Holds:
    del problem
    return grid.along("zero", [stage in (0, 1) for stage in grid.zero])


def _zero_reason(grid: StrategyGrid, problem: Problem) -> str:
    del problem
    return f"ZeRO stage {grid.zero[0]} does not go with pipelines in DeepSpeed: use 0 or 1"


def _loss_scale(grid: StrategyGrid, problem: Problem) -> Holds:
    return grid.along("zero", [problem.precision != "fp16" or stage != 0 for stage in grid.zero])


def _loss_scale_reason(grid: StrategyGrid, problem: Problem) -> str:
    del grid, problem
    return "fp16 with ZeRO stage 0 would train on wrongly scaled gradients in DeepSpeed: use stage 1, or bf16"


def _one(holds: bool) -> Holds:
    return np.full((1,) * 7, holds)


LAYOUT_RULES = (
    Rule("ranks fit the devices", _devices, _devices_reason),
    Rule("tensor-parallel ranks share heads and widths evenly", _tensor_shares, _tensor_shares_reason),
    Rule("layers were measured with this tensor-parallel size", _measured, _measured_reason),
)
"""About the layout of the ranks alone."""

TRAINER_RULES = (
    *LAYOUT_RULES,
    Rule("a layer for each stage", _layers, _layers_reason),
    Rule("the schedule takes so many model chunks", _schedule, _schedule_reason),
    Rule("the batch is dealt evenly", _batch, _batch_reason),
    Rule("layers let sequences be cut", _can_cut, _can_cut_reason),
    Rule("ZeRO stage goes with pipelines", _zero, _zero_reason),
    Rule("ZeRO stage goes with the precision", _loss_scale, _loss_scale_reason),
    Rule("recomputation is known", _recompute, _recompute_reason),
    Rule("tokens for each token slice and rank", _token_slices, _token_slices_reason),
    Rule("the stage partition fits model and stages", _partition, _partition_reason),
)
"""All that the trainer refuses, in the order in which rejections are counted: those of one axis first."""
