"""Seconds of the ops of each kind of layer on the small grid of what they depend on.

An op depends on the layout only by the ranks that share its layer and the links between them, and on the rest of a
strategy by micro-batch size, token slices, recomputation and sequence parallelism. Layouts share tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.links.rank_groups import ALONE, GroupTopology, LayerLinks
from megatron_terapipe.search.cost.stage_ops import TENSOR_PARALLEL, OpSizes
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]
Splits = tuple[tuple[tuple[int, ...], ...], ...]
"""Lengths of the token slices: [Q switches][S numbers of token slices]."""


@dataclass(frozen=True)
class OpTable:
    """Ops of layers on one device: [4 parts, K layers, B micro-batch sizes, S splits, R recomputations, Q switches]."""

    whole: Floats
    """Seconds of all token slices of one micro-batch."""
    first: Floats
    """Seconds of the first token slice."""
    last: Floats
    """Seconds of the last token slice."""
    longest: Floats
    """Seconds of the token slice that takes longest, for each part by itself."""

    def of_micro_batches(self, rows: Sequence[int]) -> "OpTable":
        """Return the table of some of the micro-batch sizes, given by their places on the axis: [4, K, rows, ...]."""
        return OpTable(*(each[:, :, rows] for each in (self.whole, self.first, self.last, self.longest)))


class OpTables:
    """Computes tables, and keeps them."""

    def __init__(self, cost_model: CostModel, micro_batch_sizes: Sequence[int]) -> None:
        """Prepare.

        Args:
            micro_batch_sizes: all that any grid has; one table is for all of them, so that layouts can share it.
        """
        self._model = cost_model
        self._sizes = tuple(micro_batch_sizes)
        self._splits: dict[tuple[object, ...], Splits] = {}
        self._tables: dict[tuple[object, ...], OpTable] = {}

    def table(self, grid: StrategyGrid, device: Device, links: LayerLinks) -> OpTable:
        """Return the table of op times [...] that a grid of strategies needs.

        Args:
            links: links between the ranks that share its layers.
        """
        splits = self.splits(grid)
        links = LayerLinks(*map(_relevant, links))
        sizes = grid.tensor_parallel_size, grid.sequence_parallel_size, grid.key_value_gradients
        key = device, links, *sizes, splits, grid.recompute, grid.sequence_parallel
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._compute(grid, device, links, splits)
        if grid.micro_batch == self._sizes:
            return known
        rows = [self._sizes.index(size) for size in grid.micro_batch]
        return known.of_micro_batches(rows)

    def splits(self, grid: StrategyGrid) -> Splits:
        """Return the lengths of the token slices of a grid's strategies."""
        sizes = grid.tensor_parallel_size, grid.sequence_parallel_size
        key = *sizes, grid.sequence_parallel, grid.token_slices, grid.lengths
        if key not in self._splits:
            self._splits[key] = tuple(
                tuple(self._split(grid, count, parallel) for count in grid.token_slices)
                for parallel in grid.sequence_parallel
            )
        return self._splits[key]

    def _split(self, grid: StrategyGrid, count: int, sequence_parallel: bool) -> tuple[int, ...]:
        seq_length = self._model.workload.seq_length
        if count * grid.granularity(sequence_parallel) > seq_length:
            return (seq_length,)  # no strategy has it: another rule says so
        return grid.cut(count, sequence_parallel, seq_length) or (seq_length,)

    def _compute(self, grid: StrategyGrid, device: Device, links: LayerLinks, splits: Splits) -> OpTable:
        axes = len(self._sizes), len(grid.token_slices), len(grid.recompute), len(grid.sequence_parallel)
        shape = (TENSOR_PARALLEL, len(self._model.counter.kinds), *axes)
        table = OpTable(*(np.empty(shape) for _ in range(4)))
        for parallel, (on, lengths) in enumerate(zip(grid.sequence_parallel, splits, strict=True)):
            starts, ends, begins = _bounds(lengths, self._model.workload.seq_length)
            for mode, (recompute, _) in enumerate(grid.recompute):
                sizes = OpSizes(
                    tensor_parallel_size=float(grid.tensor_parallel_size),
                    sequence_parallel_size=float(grid.sequence_parallel_size),
                    micro_batch_size=np.array(self._sizes, dtype=float)[:, None],
                    start=starts,
                    end=ends,
                    recompute=recompute,
                    sequence_parallel=on,
                    key_value_gradients=grid.key_value_gradients,
                )
                ops = self._model.prices.ops(device, links, sizes)[:TENSOR_PARALLEL]
                table.whole[..., mode, parallel] = np.add.reduceat(ops, begins, axis=-1)
                table.first[..., mode, parallel] = ops[..., begins]
                table.last[..., mode, parallel] = ops[..., np.append(begins[1:], ops.shape[-1]) - 1]
                table.longest[..., mode, parallel] = np.maximum.reduceat(ops, begins, axis=-1)
        return table


def _relevant(topology: GroupTopology) -> GroupTopology:
    """Return the links without what nothing crosses, so that topologies that cost as much are equal."""
    if topology.size == 1:
        return ALONE
    if topology.num_nodes == 1:
        return topology._replace(network_bandwidth=1.0, network_latency_s=0.0)
    return topology


def _bounds(splits: Sequence[tuple[int, ...]], seq_length: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Token slices of all splits, one split after the other.

    Returns:
        Start and end of each, as shares of the sequence; index of the first of each split.
    """
    lengths = np.concatenate([np.array(split) for split in splits])
    counts = np.array([len(split) for split in splits])
    begins = np.cumsum(counts) - counts
    ends = np.cumsum(lengths) - np.repeat((np.cumsum(lengths) - lengths)[begins], counts)
    return (ends - lengths) / seq_length, ends / seq_length, begins
