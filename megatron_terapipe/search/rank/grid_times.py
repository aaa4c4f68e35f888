"""Seconds of every strategy of a grid: an estimate in closed form, and a bound that no simulation of it goes below.

    OpTables          seconds of each kind of layer   [4 parts, K, B, S, R, Q], shared by layouts
      -> rank_ops     ops of each pipeline rank       counts of layers [ranks, K] x table -> [4, ranks, B, S, R, Q]
      -> message_times  messages of each boundary, where the trainer sends while it computes
      -> grid_times   estimate, bound                 [O, P, B, S, R, Q, Z]

An op depends on the layout only by the ranks that share its layer and the links between them, and on the rest of a
strategy by micro-batch size, token slices, recomputation and sequence parallelism. Ranks with the same layers, device
and links are the same row, so there are few of them however long the pipeline is. The end of the iteration, which no
schedule changes, is added to estimate and bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.devices import Device
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.layer_times import OpSizes, ScalarOrArray
from megatron_terapipe.search.price.links import ALONE, GroupTopology, LayerLinks, RankGroups, transfer_bandwidth
from megatron_terapipe.search.price.makespan import (
    Pipeline,
)
from megatron_terapipe.search.price.stages import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    TENSOR_PARALLEL,
    WEIGHT_GRADIENT,
    KindTables,
    LayerCounts,
    StageOps,
    different_rows,
    on_slowest_device,
    stage_ops,
)
from megatron_terapipe.search.price.step import CoveringOps, StepCosts, exposed_reduction_s
from megatron_terapipe.search.rank.space import StrategyGrid

Floats = NDArray[np.float64]
Splits = tuple[tuple[tuple[int, ...], ...], ...]
"""Lengths of the token slices: [Q switches][S numbers of token slices]."""


WHOLE, FIRST, LAST = range(3)
"""First axis of a table: all token slices of a micro-batch, the first, and the last."""


class OpTables:
    """Computes tables, and keeps them."""

    def __init__(self, cost_model: CostModel, micro_batch_sizes: Sequence[int]) -> None:
        self._model = cost_model
        self._sizes = tuple(micro_batch_sizes)
        self._splits: dict[tuple[object, ...], Splits] = {}
        self._tables: dict[tuple[object, ...], Floats] = {}

    def table(self, grid: StrategyGrid, device: Device, links: LayerLinks) -> Floats:
        """Return the seconds that a grid needs: [3 of `WHOLE` ..., 4 parts, K layers, B sizes, S splits, R, Q]."""
        splits = self.splits(grid)
        links = LayerLinks(*map(_relevant, links))
        layout = grid.layout
        sizes = layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size
        key = device, links, *sizes, grid.kept_keys, splits, grid.recompute, grid.sequence_parallel
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._compute(grid, device, links, splits)
        if grid.micro_batch == self._sizes:
            return known
        rows = [self._sizes.index(size) for size in grid.micro_batch]
        return np.take(known, rows, axis=3)

    def splits(self, grid: StrategyGrid) -> Splits:
        """Return the lengths of the token slices of a grid's strategies."""
        sizes = grid.layout.tensor_parallel_size, grid.layout.sequence_parallel_size
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
            return (seq_length,)  # no strategy has it, by another rule
        return grid.cut(count, sequence_parallel, seq_length) or (seq_length,)

    def _compute(self, grid: StrategyGrid, device: Device, links: LayerLinks, splits: Splits) -> Floats:
        modes, of_pair = np.unique([recompute for recompute, _ in grid.recompute], return_inverse=True)
        found = []
        for on, lengths in zip(grid.sequence_parallel, splits, strict=True):
            starts, ends, begins = _bounds(lengths, self._model.workload.seq_length)
            sizes = OpSizes(
                tensor_parallel_size=float(grid.layout.tensor_parallel_size),
                sequence_parallel_size=float(grid.layout.sequence_parallel_size),
                expert_parallel_size=float(grid.layout.expert_parallel_size),
                micro_batch_size=np.array(self._sizes, dtype=float)[:, None],
                start=starts,
                end=ends,
                recompute=modes[:, None, None],
                sequence_parallel=on,
                kept_keys=grid.kept_keys,
            )
            # A run has one dispatcher for all layers (`CostModel.dispatched`), no faster than the faster for each.
            models = self._model.by_dispatcher(grid.layout)
            ops = np.minimum.reduce([each.prices.ops(device, links, sizes)[:TENSOR_PARALLEL] for each in models])
            last = np.append(begins[1:], ops.shape[-1]) - 1
            parts = np.add.reduceat(ops, begins, axis=-1), ops[..., begins], ops[..., last]
            found.append(np.moveaxis(np.stack(parts)[:, :, :, of_pair], 3, -1))
        # In the order of its axes, in which `stage_ops` reads it without a copy.
        return np.ascontiguousarray(np.stack(found, axis=-1))


def _relevant(topology: GroupTopology) -> GroupTopology:
    """Return the links without unused ones, so that topologies with the same costs are equal."""
    if topology.size == 1:
        return ALONE
    if topology.num_nodes == 1:
        return topology._replace(network_bandwidth=1.0, network_latency_s=0.0)
    return topology


def _bounds(splits: Sequence[tuple[int, ...]], seq_length: int) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Token slices of all splits, one split after the other."""
    lengths = np.concatenate([np.array(split) for split in splits])
    counts = np.array([len(split) for split in splits])
    begins = np.cumsum(counts) - counts
    ends = np.cumsum(lengths) - np.repeat((np.cumsum(lengths) - lengths)[begins], counts)
    return (ends - lengths) / seq_length, ends / seq_length, begins


Whole = NDArray[np.int64]


@dataclass(frozen=True)
class RankOps:
    """Ops of one micro-batch of the different rows of ranks.

    A bound follows each row's last rank, because the first token slice passes most stages before it; with several model
    chunks it also follows the last stage, which comes after all others. These are the N *followed* ones.
    """

    whole: Floats
    """[4, rows, B, S, R, Q] seconds of all token slices."""
    multiplicity: Floats
    """[rows] number of ranks with the ops of a row."""
    first: int
    last: int
    """Rows of the first and the last rank."""
    completing: Floats
    """[4, B, S, R, Q] of the first token slice in the first stage, whose backward completes the gradients of the first
    rank; of two devices, the slower one."""
    stages: Whole
    """[N] stage at which each of the followed begins."""
    followed: Floats
    """[4, N, B, S, R, Q] seconds of all token slices."""
    before: Floats
    """[4, N, B, S, R, Q] of the first token slice on all stages before, at least."""
    filling_s: Floats
    """[B, S, R, Q] forwards of all token slices but the last on the first stage, at least."""
    turning: Floats
    """[4, B, S, R, Q] of the last token slice on all stages, at least."""


def rank_ops(grid: StrategyGrid, tables: KindTables, counts: LayerCounts, op_s: float) -> RankOps:
    """Return the ops of the ranks of a stage partition, [parts, ranks, B, S, R, Q]."""

    def slowest(layers: Floats) -> Floats:
        """[parts, n, B, S, R, Q] seconds of all token slices, on the slowest device of each rank."""
        return on_slowest_device([stage_ops(layers, table[WHOLE]) for table in tables.by_device])

    ranks, num_stages = len(counts.parameters), len(counts.per_stage)
    token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    of_rank = tables.layers(counts.per_rank, np.arange(ranks))
    first_of, row_of_rank = different_rows(of_rank)
    rows = of_rank[first_of]
    rows_whole = slowest(rows) + op_s * (num_stages // ranks) * token_slices
    rank_of_row = np.zeros(len(rows), np.int64)
    rank_of_row[row_of_rank] = np.arange(ranks)  # the last one of each row stays
    rank_of_stage = np.arange(num_stages) % ranks
    of_stage = tables.layers(counts.per_stage, rank_of_stage)
    stages, followed = rank_of_row, rows_whole
    if num_stages > ranks:
        last_stage = slowest(of_stage[-1:]) + op_s * token_slices
        stages, followed = np.append(stages, num_stages - 1), np.concatenate([followed, last_stage], axis=1)
    passed = np.concatenate([np.zeros((1, of_stage.shape[1])), np.cumsum(of_stage, axis=0)])
    filling = np.minimum.reduce([table[WHOLE, [FORWARD]] - table[LAST, [FORWARD]] for table in tables.by_device])
    completing = [stage_ops(of_stage[:1], table[FIRST])[:, 0] for table in tables.by_device]
    return RankOps(
        whole=rows_whole,
        multiplicity=np.bincount(row_of_rank).astype(float),
        first=int(row_of_rank[0]),
        last=int(row_of_rank[-1]),
        completing=np.maximum.reduce(completing) + op_s,
        stages=stages,
        followed=followed,
        before=stage_ops(passed[stages], tables.least[FIRST]) + op_s * stages.reshape(-1, 1, 1, 1, 1),
        filling_s=stage_ops(of_stage[:1], filling)[0, 0] + op_s * (token_slices - 1),
        turning=stage_ops(passed[-1:], tables.least[LAST])[:, 0] + op_s * num_stages,
    )


class MessageTimes(NamedTuple):
    """Seconds of messages; the same axes as ops."""

    first: Floats
    """[stages, B, S, 1, Q] that the first token slice has spent on its way to each stage."""
    last: Floats
    """[B, S, 1, Q] that the last token slice spends on its way from the first stage to the last."""
    usual: Floats
    """[B, S, 1, Q] that a token slice spends on its way through the first stages of all ranks and back."""
    busy: Floats
    """[B, 1, 1, Q] that the busiest channel, of one boundary and direction, sends in a micro-batch."""


def message_times(
    grid: StrategyGrid, groups: RankGroups, model: CostModel, elements: Sequence[tuple[float, float]], splits: Splits
) -> MessageTimes:
    """Return the times of messages between stages, as `CostModel` gives them to the simulator.

    Args:
        elements: numbers that cross each boundary: outputs of a sequence, and more with each token slice.
    """
    ranks, boundaries = grid.layout.pipeline_parallel_size, len(elements)
    shape = (len(grid.micro_batch), len(grid.token_slices), 1, len(grid.sequence_parallel))
    if ranks == 1 or not model.software.communication.overlaps_transfers:
        nothing = np.zeros(shape)
        return MessageTimes(np.zeros((boundaries + 1, *shape)), nothing, nothing, nothing[:, :1])
    efficiency, links = model.efficiency, groups.pipe.at(np.arange(boundaries) % ranks)
    reached = transfer_bandwidth(links, efficiency)
    latency_s = _column(links.latency_s + efficiency.transfer_s)
    outputs, extra = map(_column, np.array(elements, dtype=float).T)
    sizes = np.array(grid.micro_batch, dtype=float).reshape(-1, 1, 1, 1)
    own = np.array([1 / grid.granularity(parallel) for parallel in grid.sequence_parallel])
    token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    whole = outputs * sizes * own + token_slices * extra
    """[boundaries, B, S, 1, Q] elements of a micro-batch."""

    def one_token_slice(place: int) -> Floats:
        """[boundaries, B, S, 1, Q] seconds of the messages of a token slice."""
        share = np.array([[lengths[place] / sum(lengths) for lengths in each] for each in splits]).T[None, :, None]
        # The simulator has one size for all boundaries, and writes other sizes as other bandwidths.
        numbers = (outputs[0] * sizes * own * share + extra[0]) * whole / np.maximum(whole[0], 1.0)
        return np.asarray(latency_s + model.element_bytes * numbers / _column(reached))

    first = one_token_slice(0)
    arrives = np.concatenate([np.zeros((1, *first.shape[1:])), np.cumsum(first, axis=0)])
    busy = model.element_bytes * (outputs * sizes * own / _column(reached)).max(axis=0)
    return MessageTimes(arrives, one_token_slice(-1).sum(axis=0), 2 * arrives[ranks - 1], busy)


def _column(values: ScalarOrArray) -> Floats:
    return np.asarray(values).reshape(-1, 1, 1, 1, 1)


def grid_times(
    grid: StrategyGrid,
    groups: RankGroups,
    cost_model: CostModel,
    tables: OpTables,
    counts: Mapping[tuple[int, int], LayerCounts],
    *,
    pairs: NDArray[np.bool_],
) -> tuple[Floats, Floats]:
    """Return two of [grid] seconds of one iteration: in closed form, and those that no schedule of it goes below.

    Args:
        pairs: [O, P] the pairs of a schedule and a partition that are priced.
    """
    layers = [(layer.output_elements, layer.extra_output_elements) for layer in cost_model.workload.layers]
    wanted = []
    for (model_chunks, place), found in counts.items():
        if orders := [row for row, order in enumerate(grid.order) if order[1] == model_chunks and pairs[row, place]]:
            wanted.append((place, found, tuple(layers[index] for index in found.last_layers), orders))
    partitions = [found for _, found, *_ in wanted]
    ends = [cost_model.step(partitions, groups, *each) for each in grid.zero]

    def of_replicas(alike: RankGroups) -> tuple[Floats, Floats]:
        """Price the grid with the devices and links of one kind of replica; all of them end the iteration together."""
        estimate = np.full(grid.shape, np.inf)
        bound = np.full(grid.shape, np.inf)
        of_kinds = KindTables.of(alike, lambda device, links: tables.table(grid, device, links), axis=2)
        sent: dict[tuple[tuple[float, float], ...], MessageTimes] = {}
        for number, (place, found, elements, orders) in enumerate(wanted):
            ops = rank_ops(grid, of_kinds, found, cost_model.efficiency.op_s)
            if elements not in sent:
                sent[elements] = message_times(grid, alike, cost_model, elements, tables.splits(grid))
            for order in orders:
                pipeline = _pipeline(grid, *grid.order[order])
                bound_s = _bound(pipeline, ops, sent[elements])
                estimate_s = pipeline.makespan_s(ops.whole, ops.multiplicity, travelling_s=sent[elements].usual)
                estimate_s = np.maximum(estimate_s, bound_s)
                covering = CoveringOps(
                    completing=ops.completing[WEIGHT_GRADIENT if pipeline.defers else BACKWARD],
                    forward=ops.whole[FORWARD, ops.first],
                    backward=ops.whole[BACKWARD, ops.first],
                    layers=float(found.first_stage[0].sum()),
                    pipeline=pipeline,
                )
                for zero, (end, (zero_stage, _)) in enumerate(zip(ends, grid.zero, strict=True)):
                    step = StepCosts(*(np.asarray(part)[:, number] for part in end))
                    step_s = _step_s(step, covering, cost_model, zero_stage)
                    estimate[order, place, ..., zero] = estimate_s + step_s
                    bound[order, place, ..., zero] = bound_s + step_s
        return estimate, bound

    # Replicas on unlike nodes do not wait for each other: an iteration takes as long as on the slowest.
    estimates, bounds = zip(*map(of_replicas, groups.by_replica), strict=True)
    return np.maximum.reduce(estimates), np.maximum.reduce(bounds)


def _bound(pipeline: Pipeline, ops: RankOps, messages: MessageTimes) -> Floats:
    """[B, S, R, Q] seconds of the ops that no simulation goes below."""
    before = ops.before + messages.first[ops.stages]
    each = pipeline.lower_bound_s(StageOps(*ops.followed), StageOps(*before))
    bound = np.maximum(np.max(each, axis=0), pipeline.num_micro_batches * messages.busy)
    if pipeline.runs_ahead:
        back = INPUT_GRADIENT if pipeline.defers else BACKWARD
        waiting = pipeline.round_trip_bound_s(
            filling_s=ops.filling_s,
            forward_s=ops.turning[FORWARD] + messages.last,
            backward_s=ops.turning[back] + messages.last,
            last=(ops.whole[FORWARD, ops.last], ops.whole[back, ops.last]),
            draining_s=before[back, ops.last],
        )
        bound = np.maximum(bound, waiting)
    return np.asarray(bound)


def _pipeline(grid: StrategyGrid, schedule: str, model_chunks: int) -> Pipeline:
    """Pipelines of a grid: numbers of micro-batches [B, 1, 1, 1], and of token slices [1, S, 1, 1]."""
    micro_batches = grid.num_micro_batches.reshape(-1, 1, 1, 1).astype(float)
    token_slices = np.array(grid.token_slices, dtype=float).reshape(1, -1, 1, 1)
    return Pipeline(schedule, grid.layout.pipeline_parallel_size, model_chunks, micro_batches, token_slices)


def _step_s(step: StepCosts, covering: CoveringOps, model: CostModel, zero_stage: int) -> Floats:
    """[B, S, R, Q] seconds after the last op.

    Of reductions that overlap only the first rank's count: the others run until it is done.
    """
    fixed = float(np.max(step.shared_weight)) + float(np.max(step.optimizer)) + model.efficiency.iteration_s
    communication = model.software.communication
    first = StepCosts(*(float(np.asarray(part)[0]) for part in step))
    if not communication.overlaps_gradient_reduction:
        first = first._replace(gradient_reduction=float(np.max(step.gradient_reduction)))
    shown = exposed_reduction_s(first, covering, communication, model.efficiency, zero_stage=zero_stage)
    return np.asarray(shown + fixed)
