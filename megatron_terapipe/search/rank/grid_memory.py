"""Bytes that no strategy of a grid gets by with: what its fullest pipeline ranks hold at least.

The ranks at the ends are looked at, and those with most parameters or layers: one of them is the fullest, and a bound
holds for whichever ranks are left out. A rank holds most as a backward starts after its last warm-up forward, when

    1f1b          min(P - i - 1 + S, M S)                                       (arXiv 2406.03488 section 3.2)
    zero-bubble   min(P - 1 + S, M S)                                           (arXiv 2401.10241 section 3, ZB-H1)
    interleaved   min((V - 1) G S + S - 1 + 2 (P - i - 1) + 1, V M S)           (`plan.schedules`, groups of G)
    gpipe         V M S

token slices are live on rank i. `memory.model` counts the same op by op for strategies that may win.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.activation_memory import logit_limits, token_memory
from megatron_terapipe.search.cost.memory_model import ELEMENT_BYTES, TRANSFERS, MemoryModel
from megatron_terapipe.search.cost.rank_groups import RankGroups
from megatron_terapipe.search.cost.state_memory import bucket_bytes, state_bytes
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.rank.stage_counts import StageCounts
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]

ACTIVATIONS, KEY_VALUES, KEY_VALUE_GRADIENTS, LOGITS, WORKING = range(5)


def grid_fits(
    grid: StrategyGrid,
    groups: RankGroups,
    model: MemoryModel,
    layers: tuple[Layer, ...],
    counts: Mapping[tuple[int, int], StageCounts],
) -> NDArray[np.bool_]:
    """Which strategies of a grid may fit the devices: [grid]; those that surely do not are False.

    Args:
        grid: the grid.
        groups: devices of its layout.
        model: prices memory.
        layers: the K kinds of layers.
        counts: layers of each rank, by number of model chunks and place on the axis `partition`.
    """
    usable = model.overheads.usable_share
    fits = np.zeros(grid.shape, dtype=bool)
    tokens: Floats | None = None
    messages = np.zeros(())
    for (model_chunks, place), found in counts.items():
        ranks = _ranks_to_look_at(found)
        capacities = [min(each.memory_bytes for each in groups.devices[rank]) * usable for rank in ranks]
        states = [_state_bytes(grid, model, found, rank) for rank in ranks]
        if any((held.kept > capacity).all() for held, capacity in zip(states, capacities, strict=True)):
            continue
        if tokens is None:
            tokens, messages = _token_bytes(grid, model, layers), _message_bytes(grid, model, layers)
        for order, (schedule, its_model_chunks) in enumerate(grid.order):
            if its_model_chunks != model_chunks:
                continue
            fits[order, place] = True
            for rank, held, capacity in zip(ranks, states, capacities, strict=True):
                moving = _moving_bytes(grid, model, tokens, found, rank, schedule, model_chunks)
                fits[order, place] &= held.kept + messages + np.maximum(moving[..., None], held.step) <= capacity
    return fits


def _ranks_to_look_at(counts: StageCounts) -> list[int]:
    ranks = len(counts.parameters)
    return sorted({0, ranks - 1, int(np.argmax(counts.parameters)), int(np.argmax(counts.per_rank.sum(axis=1)))})


def _token_bytes(grid: StrategyGrid, model: MemoryModel, layers: tuple[Layer, ...]) -> Floats:
    """[5 parts, K, R, Q] bytes of one token of one sequence in each kind of layer."""
    table = np.zeros((5, len(layers), len(grid.recompute), len(grid.sequence_parallel)))
    config = model.workload.config
    for kind, layer in enumerate(layers):
        for mode, recompute in enumerate(grid.recompute):
            for column, parallel in enumerate(grid.sequence_parallel):
                found = token_memory(
                    layer,
                    model.software,
                    element_bytes=ELEMENT_BYTES[model.precision],
                    tensor_parallel_size=grid.tensor_parallel_size,
                    recompute=recompute,
                    sequence_parallel=parallel,
                    activation_is_read_off_output=config is not None and config.activation == "relu",
                )
                rows_per_token = layer.tokens / model.workload.seq_length
                table[:, kind, mode, column] = [float(part) * rows_per_token for part in found[:5]]
    return table


def live_token_slices(
    schedule: str, num_ranks: int, model_chunks: int, rank: int, num_micro_batches: Floats, num_token_slices: Floats
) -> Floats:
    """Token slices, of one stage each, that are live on a rank when it holds most; arrays broadcast."""
    most = model_chunks * num_micro_batches * num_token_slices
    if schedule == "gpipe":
        return most
    if schedule == "zero-bubble":
        return np.minimum(num_ranks - 1 + num_token_slices, most)
    if schedule == "interleaved" and model_chunks > 1:
        passes = (model_chunks - 1) * group_size(num_ranks, num_micro_batches, num_token_slices) * num_token_slices
        return np.minimum(passes + num_token_slices + 2 * (num_ranks - rank - 1), most)
    return np.minimum(num_ranks - rank - 1 + num_token_slices, most)


def group_size(num_ranks: int, num_micro_batches: Floats, num_token_slices: Floats) -> Floats:
    """Micro-batches of the longest group that passes a model chunk together (`plan.schedules.interleaved`)."""
    least = np.ceil(num_ranks / num_token_slices)
    return np.asarray(np.ceil(num_micro_batches / np.maximum(num_micro_batches // least, 1)))


class _States(NamedTuple):
    """[Z] bytes of one rank whatever its schedule."""

    kept: Floats
    step: Floats


def _state_bytes(grid: StrategyGrid, model: MemoryModel, counts: StageCounts, rank: int) -> _States:
    overheads = model.overheads
    parameters = float(counts.parameters[rank])
    axes = (grid.data_parallel_size, grid.tensor_parallel_size, grid.pipeline_parallel_size)
    communicators = sum(size > 1 for size in axes) * any(node.device.is_gpu for node in model.cluster.nodes)
    kept, step = [], []
    for zero_stage in grid.zero:
        each = state_bytes(
            model.software.name, model.precision, zero_stage=zero_stage, data_parallel_size=grid.data_parallel_size
        )
        bytes_each = each.weights + each.gradients + float(each.optimizer)
        buckets = float(bucket_bytes(model.software.name, model.precision, parameters, zero_stage))
        kept.append(parameters * bytes_each * overheads.state_factor + buckets)
        step.append(parameters * float(each.step))
    framework = overheads.framework_bytes + communicators * overheads.communicator_bytes
    return _States(np.array(kept) + framework, np.array(step))


def _live_per_model_chunk(live: Floats, model_chunks: int, group: Floats, num_token_slices: Floats) -> list[Floats]:
    """How many of the live token slices are on each of a rank's stages: groups pass one stage after the other."""
    if model_chunks == 1:
        return [live]
    each = group * num_token_slices
    rounds = live // (model_chunks * each)
    rest = live - rounds * model_chunks * each
    return [rounds * each + np.clip(rest - model_chunk * each, 0, each) for model_chunk in range(model_chunks)]


def _moving_bytes(
    grid: StrategyGrid,
    model: MemoryModel,
    tokens: Floats,
    counts: StageCounts,
    rank: int,
    schedule: str,
    model_chunks: int,
) -> Floats:
    """[B, S, R, Q] bytes of one rank that come and go, at least."""
    ranks, overheads = grid.pipeline_parallel_size, model.overheads
    num_token_slices = np.array(grid.token_slices, dtype=float)[None, :]
    sizes = np.array(grid.micro_batch, dtype=float)[:, None]
    micro_batches = grid.num_micro_batches.reshape(-1, 1).astype(float)
    live = live_token_slices(schedule, ranks, model_chunks, rank, micro_batches, num_token_slices)
    group = group_size(ranks, micro_batches, num_token_slices)
    stages = counts.per_stage[rank::ranks]
    sequence = model.workload.seq_length * sizes  # tokens of a micro-batch
    of_token_slice = sequence / num_token_slices

    def times(amount: Floats, each: Floats) -> Floats:
        return amount[:, :, None, None] * each

    on_stages = np.stack(_live_per_model_chunk(live, model_chunks, group, num_token_slices), axis=-1)
    amounts = on_stages * of_token_slice[..., None]

    def on_all_stages(each: Floats) -> Floats:
        each = np.tensordot(stages, each, axes=1)
        total = amounts.reshape(-1, model_chunks) @ each.reshape(model_chunks, -1)
        return np.asarray(total.reshape(*live.shape, *each.shape[1:]))

    limits = logit_limits(model.software, ELEMENT_BYTES[model.precision])
    held = on_all_stages(tokens[ACTIVATIONS] + tokens[KEY_VALUES])
    held += np.minimum(on_all_stages(tokens[LOGITS]), limits.kept)
    # The first backward is one of the last stage of the rank.
    held += times(sequence - of_token_slice, np.tensordot(stages[-1], tokens[KEY_VALUE_GRADIENTS], axes=1))
    on_last = stages[-1] > 0
    working = [times(of_token_slice, each) for each in tokens[WORKING][on_last]]
    for index, logits in enumerate(tokens[LOGITS][on_last]):
        if np.any(logits):
            working[index] = np.minimum(working[index], limits.working)
    held += overheads.working_factor * np.max(working, axis=0)
    return np.asarray(overheads.activation_factor * held)


def _message_bytes(grid: StrategyGrid, model: MemoryModel, layers: tuple[Layer, ...]) -> Floats:
    """[B, S, 1, Q, 1] bytes of the messages that a rank holds."""
    if grid.pipeline_parallel_size == 1:
        return np.zeros((1,) * 5)
    sizes = np.array(grid.micro_batch, dtype=float).reshape(-1, 1, 1, 1, 1)
    num_token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1, 1)
    elements = max(layer.output_elements for layer in layers) * _own_share(grid).reshape(1, 1, 1, -1, 1)
    return np.asarray(TRANSFERS * ELEMENT_BYTES[model.precision] * elements * sizes / num_token_slices)


def _own_share(grid: StrategyGrid) -> Floats:
    """[Q] of the tokens between layers, what a tensor-parallel rank has."""
    return np.array([1 / grid.tensor_parallel_size if parallel else 1.0 for parallel in grid.sequence_parallel])
