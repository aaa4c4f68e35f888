"""Seconds that messages between stages take in every strategy of a grid."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cluster.rank_groups import RankGroups
from megatron_terapipe.search.cost.collectives import transfer_bandwidth
from megatron_terapipe.search.cost.model import CostModel
from megatron_terapipe.search.ranking.stage_counts import StageCounts
from megatron_terapipe.search.space.block import Block

Floats = NDArray[np.float64]


class Hops(NamedTuple):
    """Seconds of messages; the axes are those of ops.

    Attributes:
        least: [B, S, 1, 1] that the first token slice travels from the first rank to the last at least.
        usual: [B, S, 1, Q] that a token slice travels there and back.
        busy: [B, 1, 1, Q] that the busiest channel, of one boundary and direction, sends in a micro-batch.
    """

    least: Floats
    usual: Floats
    busy: Floats


def block_hops(block: Block, groups: RankGroups, model: CostModel, counts: StageCounts) -> Hops:
    """Price them.

    Args:
        block: the grid.
        groups: links of its layout.
        model: what prices a strategy.
        counts: layers of each stage.
    """
    ranks = block.pipeline_parallel_size
    shape = (len(block.micro_batch), len(block.token_slices), 1, 1)
    if ranks == 1 or not model.software.overlaps_transfers:
        return Hops(np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, 1, 1)))
    physics, links = model.physics, groups.pipe
    outputs = np.array([model.workload.layers[index].output_elements for index in counts.last_layers], dtype=float)
    latency = float((links.latency_s[: ranks - 1] + physics.transfer_s).sum())
    reached = transfer_bandwidth(links.bandwidth, links.crosses_nodes, physics)
    per_sequence = outputs / np.asarray(reached)[np.arange(len(outputs)) % ranks]
    sizes = np.array(block.micro_batch, dtype=float).reshape(-1, 1, 1, 1)
    seq_length = model.workload.seq_length
    share = np.array(
        [(block.lengths or _equal(count, seq_length))[0] / seq_length for count in block.token_slices]
    ).reshape(1, -1, 1, 1)
    tensor = block.tensor_parallel_size
    own = np.array([1 / tensor if parallel else 1.0 for parallel in block.sequence_parallel])
    sent = model.element_bytes * sizes * own
    moving = sent * share * per_sequence[: ranks - 1].sum()
    # Sizes of uneven layers are averaged over a micro-batch when messages are simulated: the least leaves them out.
    return Hops(np.broadcast_to(latency, shape), 2 * (latency + moving), sent * per_sequence.max())


def _equal(count: int, seq_length: int) -> tuple[float, ...]:
    return (seq_length / count,)
