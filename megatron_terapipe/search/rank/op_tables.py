"""Seconds of the ops of each kind of layer on the small grid of what they depend on.

An op depends on the layout only by its tensor-parallel size and the links between those ranks, and on the rest of a
strategy by micro-batch size, token slices, recomputation and sequence parallelism. Layouts share tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.collectives import GroupTopology
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.stage_ops import layer_ops
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.space.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
"""Rows of the first axis of a table."""


@dataclass(frozen=True)
class OpTable:
    """Ops of layers on one device: [4 parts, K layers, B micro-batch sizes, S cuts, R recomputations, Q switches].

    Attributes:
        whole: seconds of all token slices of one micro-batch.
        first: seconds of the first token slice.
    """

    whole: Floats
    first: Floats


class OpTables:
    """Computes tables, and keeps them."""

    def __init__(self, cost_model: CostModel, micro_batch_sizes: Sequence[int]) -> None:
        """Prepare.

        Args:
            cost_model: what prices layers.
            micro_batch_sizes: all that any grid has; one table is for all of them, so that layouts can share it.
        """
        self._model = cost_model
        self._sizes = tuple(micro_batch_sizes)
        layers = {id(layer): layer for layer in cost_model.workload.layers}
        self.layers: tuple[Layer, ...] = tuple(layers.values())
        """The different layers of the model: its K kinds."""
        self._tables: dict[tuple[object, ...], OpTable] = {}

    def table(self, grid: StrategyGrid, device: Device, topology: GroupTopology) -> OpTable:
        """The table that a grid of strategies needs.

        Args:
            grid: its axes.
            device: what computes.
            topology: links between its tensor-parallel ranks.
        """
        cuts = tuple(
            tuple(self._cut(grid, count, parallel) for count in grid.token_slices)
            for parallel in grid.sequence_parallel
        )
        topology = _relevant(topology)
        key = (
            device,
            topology,
            grid.tensor_parallel_size,
            cuts,
            grid.recompute,
            grid.sequence_parallel,
        )
        known = self._tables.get(key)
        if known is None:
            known = self._compute(grid, device, topology, cuts)
            self._tables[key] = known
        if grid.micro_batch == self._sizes:
            return known
        rows = [self._sizes.index(size) for size in grid.micro_batch]
        return OpTable(known.whole[:, :, rows], known.first[:, :, rows])

    def _cut(self, grid: StrategyGrid, count: int, sequence_parallel: bool) -> tuple[int, ...]:
        seq_length = self._model.workload.seq_length
        needed = grid.tensor_parallel_size if sequence_parallel else 1
        if count * needed > seq_length:
            return (seq_length,)  # no strategy has it: another rule says so
        return grid.cut(count, sequence_parallel, seq_length) or (seq_length,)

    def _compute(
        self, grid: StrategyGrid, device: Device, topology: GroupTopology, cuts: Sequence[Sequence[tuple[int, ...]]]
    ) -> OpTable:
        shape = (
            4,
            len(self.layers),
            len(self._sizes),
            len(grid.token_slices),
            len(grid.recompute),
            len(grid.sequence_parallel),
        )
        whole, first = np.empty(shape), np.empty(shape)
        sizes = np.array(self._sizes, dtype=float)[:, None]
        for parallel, (on, lengths) in enumerate(zip(grid.sequence_parallel, cuts, strict=True)):
            starts, ends, begins = _bounds(lengths, self._model.workload.seq_length)
            for mode, recompute in enumerate(grid.recompute):
                for kind, layer in enumerate(self.layers):
                    ops = layer_ops(
                        layer,
                        device,
                        self._model.op_times,
                        self._model.efficiency,
                        topology,
                        tensor_parallel_size=float(grid.tensor_parallel_size),
                        micro_batch_size=sizes,
                        start=starts * layer.tokens,
                        end=ends * layer.tokens,
                        recompute=recompute,
                        sequence_parallel=on,
                        element_bytes=self._model.element_bytes,
                    )
                    for part, seconds in enumerate(ops[:4]):
                        seconds = np.broadcast_to(seconds, (len(sizes), len(starts)))
                        whole[part, kind, :, :, mode, parallel] = np.add.reduceat(seconds, begins, axis=1)
                        first[part, kind, :, :, mode, parallel] = seconds[:, begins]
        return OpTable(whole, first)


def _relevant(topology: GroupTopology) -> GroupTopology:
    """The same links without what nothing crosses, so that topologies that cost the same are equal."""
    if topology.size == 1:
        return GroupTopology(1, 1.0, 1.0, 0.0, 1.0, 0.0)
    if topology.num_nodes == 1:
        return topology._replace(network_bandwidth=1.0, network_latency_s=0.0)
    return topology


def _bounds(cuts: Sequence[tuple[int, ...]], seq_length: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Token slices of all cuts, one cut after the other.

    Returns:
        Start and end of each, as shares of the sequence; index of the first of each cut.
    """
    starts: list[int] = []
    ends: list[int] = []
    begins: list[int] = []
    for cut in cuts:
        begins.append(len(starts))
        at = 0
        for length in cut:
            starts.append(at)
            at += length
            ends.append(at)
    return np.array(starts) / seq_length, np.array(ends) / seq_length, np.array(begins)
