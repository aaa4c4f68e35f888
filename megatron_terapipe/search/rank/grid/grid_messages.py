"""Seconds of the messages between the stages of a grid's strategies, where a trainer sends them while it computes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.links.collectives import transfer_bandwidth
from megatron_terapipe.search.cost.links.rank_groups import RankGroups
from megatron_terapipe.search.rank.grid.op_tables import Splits
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]


class MessageTimes(NamedTuple):
    """Seconds of messages; the axes are those of ops."""

    first: Floats
    """[stages, B, S, 1, Q] that the first token slice has spent on its way to each stage."""
    last: Floats
    """[B, S, 1, Q] that the last token slice spends on its way from the first stage to the last."""
    usual: Floats
    """[B, S, 1, Q] that a token slice spends on its way through the first stages of all ranks and back."""
    busy: Floats
    """[B, 1, 1, Q] that the busiest channel, of one boundary and direction, sends in a micro-batch."""


def message_times(
    grid: StrategyGrid, groups: RankGroups, model: CostModel, counts: LayerCounts, splits: Splits
) -> MessageTimes:
    """Return the times of messages between stages, as `CostModel` gives them to the simulator.

    Args:
        splits: lengths of the token slices.
    """
    ranks, boundaries = grid.pipeline_parallel_size, len(counts.last_layers)
    shape = (len(grid.micro_batch), len(grid.token_slices), 1, len(grid.sequence_parallel))
    if ranks == 1 or not model.software.communication.overlaps_transfers:
        nothing = np.zeros(shape)
        return MessageTimes(np.zeros((boundaries + 1, *shape)), nothing, nothing, nothing[:, :1])
    efficiency, links = model.efficiency, groups.pipe
    rank = np.arange(boundaries) % ranks
    reached = np.asarray(transfer_bandwidth(links.bandwidth, links.crosses_nodes, efficiency))[rank]
    latency_s = _column(links.latency_s[rank] + efficiency.transfer_s)
    layers = [model.workload.layers[index] for index in counts.last_layers]
    outputs = _column(np.array([layer.output_elements for layer in layers], dtype=float))
    extra = _column(np.array([layer.extra_output_elements for layer in layers], dtype=float))
    sizes = np.array(grid.micro_batch, dtype=float).reshape(-1, 1, 1, 1)
    own = np.array([1 / grid.granularity(parallel) for parallel in grid.sequence_parallel])
    token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    whole = outputs * sizes * own + token_slices * extra
    """[boundaries, B, S, 1, Q] elements of a micro-batch."""

    def one_token_slice(place: int) -> Floats:
        """[boundaries, B, S, 1, Q] seconds of the messages of a token slice."""
        share = np.array([[lengths[place] / sum(lengths) for lengths in each] for each in splits]).T[None, :, None]
        # The simulator has one size for all boundaries, and writes other sizes as other bandwidths.
        elements = (outputs[0] * sizes * own * share + extra[0]) * whole / np.maximum(whole[0], 1.0)
        return np.asarray(latency_s + model.element_bytes * elements / _column(reached))

    first = one_token_slice(0)
    arrives = np.concatenate([np.zeros((1, *first.shape[1:])), np.cumsum(first, axis=0)])
    busy = model.element_bytes * (outputs * sizes * own / _column(reached)).max(axis=0)
    return MessageTimes(arrives, one_token_slice(-1).sum(axis=0), 2 * arrives[ranks - 1], busy)


def _column(values: Floats) -> Floats:
    """[boundaries, 1, 1, 1, 1]."""
    return np.asarray(values).reshape(-1, 1, 1, 1, 1)
