"""Bytes that no strategy of a grid gets by with: what its fullest pipeline ranks hold at least.

The ranks at the ends are looked at, and those with most parameters or layers: one of them is the fullest, and a bound
holds for whichever ranks are left out. A rank holds most as a backward starts after its last warm-up forward, when

    1f1b          min(P - i - 1 + S, M S)                                       (arXiv 2406.03488 section 3.2)
    zero-bubble   min(P - 1 + S, M S)                                           (arXiv 2401.10241 section 3, ZB-H1)
    interleaved   min((V - 1) G S + S - 1 + 2 (P - i - 1) + 1, V M S)           (`plan.schedules.interleaved`, groups of G)
    gpipe         V M S

token slices are live on rank i. `memory.model` counts the same op by op for strategies that may win.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cluster.rank_groups import RankGroups
from megatron_terapipe.search.memory import MemoryModel
from megatron_terapipe.search.memory.activations import token_memory
from megatron_terapipe.search.memory.model import ELEMENT_BYTES
from megatron_terapipe.search.memory.states import bucket_bytes, state_bytes
from megatron_terapipe.search.ranking.stage_counts import StageCounts
from megatron_terapipe.search.space.block import Block
from megatron_terapipe.search.workload import Layer

Floats = NDArray[np.float64]

ACTIVATIONS, KEY_VALUES, KEY_VALUE_GRADIENTS, LOGITS, WORKING = range(5)


def block_fits(
    block: Block,
    groups: RankGroups,
    model: MemoryModel,
    layers: tuple[Layer, ...],
    counts: Mapping[tuple[int, int], StageCounts],
) -> NDArray[np.bool_]:
    """Which strategies of a grid may fit the devices: [grid]; those that surely do not are False.

    Args:
        block: the grid.
        groups: devices of its layout.
        model: prices memory.
        layers: the K kinds of layers.
        counts: layers of each rank, by number of model chunks and place on the axis `partition`.
    """
    fits = np.ones(block.shape, dtype=bool)
    tokens = _token_bytes(block, model, layers)
    for (chunks, place), found in counts.items():
        orders = [index for index, (_, its_chunks) in enumerate(block.order) if its_chunks == chunks]
        for rank in _ranks_to_look_at(found):
            capacity = min(device.memory_bytes for device in groups.devices[rank]) * model.physics.usable_share
            for order in orders:
                held = _rank_bytes(block, model, tokens, found, rank, *block.order[order])
                fits[order, place] &= held <= capacity
    return fits


def _ranks_to_look_at(counts: StageCounts) -> list[int]:
    ranks = len(counts.parameters)
    heaviest = int(np.argmax(counts.parameters))
    longest = int(np.argmax(counts.per_rank.sum(axis=1)))
    return sorted({0, min(1, ranks - 1), ranks - 1, heaviest, longest})


def _token_bytes(block: Block, model: MemoryModel, layers: tuple[Layer, ...]) -> Floats:
    """[5 parts, K, R, Q] bytes of one token of one sequence in each kind of layer."""
    table = np.zeros((5, len(layers), len(block.recompute), len(block.sequence_parallel)))
    config = model.workload.config
    for kind, layer in enumerate(layers):
        for mode, recompute in enumerate(block.recompute):
            for column, parallel in enumerate(block.sequence_parallel):
                found = token_memory(
                    layer,
                    model.software,
                    element_bytes=ELEMENT_BYTES[model.precision],
                    tensor_parallel_size=block.tensor_parallel_size,
                    recompute=recompute,
                    sequence_parallel=parallel,
                    activation_is_read_off_output=config is not None and config.activation == "relu",
                )
                table[:, kind, mode, column] = [float(part) for part in found[:5]]
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
        least = np.ceil(num_ranks / num_token_slices)
        group = np.ceil(num_micro_batches / np.maximum(num_micro_batches // least, 1))
        passes = (model_chunks - 1) * group * num_token_slices
        return np.minimum(passes + num_token_slices + 2 * (num_ranks - rank - 1), most)
    return np.minimum(num_ranks - rank - 1 + num_token_slices, most)


def _rank_bytes(
    block: Block, model: MemoryModel, tokens: Floats, counts: StageCounts, rank: int, schedule: str, chunks: int
) -> Floats:
    """[B, S, R, Q, Z] bytes of one rank, at least."""
    ranks, physics = block.pipeline_parallel_size, model.physics
    slices = np.array(block.token_slices, dtype=float)[None, :]
    sizes = np.array(block.micro_batch, dtype=float)[:, None]
    micro_batches = block.num_micro_batches.reshape(-1, 1).astype(float)
    live = live_token_slices(schedule, ranks, chunks, rank, micro_batches, slices)
    # Of several stages the smallest counts, except that the last one alone has logits.
    stages = np.einsum("sk,pkrq->psrq", counts.per_stage[rank::ranks], tokens)
    least = stages.min(axis=1) if chunks > 1 else stages[:, 0]
    present = counts.per_rank[rank] > 0
    working = tokens[WORKING][present].max(axis=0) if chunks == 1 else tokens[WORKING][present].min(axis=0)
    sequence = model.workload.seq_length * sizes  # tokens of a micro-batch
    of_slice = sequence / slices

    def times(amount: Floats, each: Floats) -> Floats:
        return amount[:, :, None, None] * each

    activations = times(live * of_slice, least[ACTIVATIONS] + least[KEY_VALUES] + (least[LOGITS] if chunks == 1 else 0.0))
    gradients = times(sequence - of_slice, least[KEY_VALUE_GRADIENTS])
    moving = physics.activation_factor * (activations + gradients + physics.working_factor * times(of_slice, working))
    parameters = float(counts.parameters[rank]) - _held_twice(model, counts, rank, block.tensor_parallel_size)
    columns = []
    for zero_stage in block.zero:
        states = state_bytes(
            model.software.name, model.precision, zero_stage=zero_stage, data_parallel_size=block.data_parallel_size
        )
        kept = parameters * (states.weights + states.gradients + float(states.optimizer)) * physics.state_factor
        kept += float(bucket_bytes(model.software.name, model.precision, parameters, zero_stage))
        columns.append(kept + np.maximum(moving, parameters * float(states.step)))
    axes = (block.data_parallel_size, block.tensor_parallel_size, ranks)
    communicators = sum(size > 1 for size in axes) * any(node.device.is_gpu for node in model.cluster.nodes)
    return np.stack(columns, axis=-1) + physics.framework_bytes + communicators * physics.communicator_bytes


def _held_twice(model: MemoryModel, counts: StageCounts, rank: int, tensor_parallel_size: int) -> float:
    """Parameters of a shared weight that both its layers on this rank were counted with."""
    if counts.shared_parameters[rank] > 0 or len(counts.parameters) > 1:
        return 0.0
    shared = [layer for layer in model.workload.layers if layer.shared_weight is not None]
    names = [layer.shared_weight for layer in shared]
    again = [layer for index, layer in enumerate(shared) if layer.shared_weight in names[:index]]
    return sum(layer.shared_parameters for layer in again) / tensor_parallel_size
