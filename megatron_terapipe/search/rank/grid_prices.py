"""Closed-form prices of a space: an estimate and a lower bound in seconds of every strategy that may fit.

    legal grid --GridMemory--> may fit --grid_times--> estimate, bound --> PricedGrid

Bytes are a lower bound, too. The ranks at the ends are counted, and those with most parameters or layers: one of them
is the fullest, and a bound is valid whichever ranks are left out. A rank holds most as a backward starts after its last
warm-up forward, when

    1f1b          min(P - i - 1 + S, M S)                                       (arXiv 2406.03488 section 3.2)
    zero-bubble   min(P - 1 + S, M S)                                           (arXiv 2401.10241 section 3, ZB-H1)
    interleaved   min((V - 1) G S + S - 1 + 2 (P - i - 1) + 1, V M S)           (`plan.schedules`, groups of G)
    gpipe         V M S, and so breadth-first

token slices are live on rank i; with zero-bubble the weight gradients of i of them wait.
`price.activations.peak_held` counts the same op by op for strategies that may win.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.schedules import KEEPING_ALL
from megatron_terapipe.search.price.activations import Held, TokenMemory, working_bytes
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import ScalarOrArray
from megatron_terapipe.search.price.links import RankGroups
from megatron_terapipe.search.price.memory import Counted, MemoryModel, host_bytes, total_bytes
from megatron_terapipe.search.price.stages import LayerCounter, LayerCounts
from megatron_terapipe.search.rank.grid_times import OpTables, grid_times
from megatron_terapipe.search.rank.rules import (
    SAME_STAGES,
    LegalGrid,
    ProgressCallback,
    SearchCounts,
    legal_grids,
    no_progress,
)
from megatron_terapipe.search.rank.space import Axis, Choices, SearchProblem, StrategyGrid
from megatron_terapipe.search.rank.stage_partition import balanced_partition, layer_times
from megatron_terapipe.strategy import SOLVED, Strategy

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class GridMemory:
    """The strategies of one grid that may fit. Bytes are counted once for each stage partition, and kept."""

    def __init__(self, grid: StrategyGrid, model: MemoryModel) -> None:
        self._grid, self._model = grid, model
        self._known_held: dict[tuple[object, ...], Held] = {}
        self._known_totals: dict[tuple[object, ...], Floats] = {}
        self._live_tokens = cache(self._live_tokens_of)
        self._micro_batches = grid.num_micro_batches.reshape(-1, 1).astype(float)
        """[B, 1]"""
        self._num_token_slices = np.array(grid.token_slices, dtype=float)[None, :]
        """[1, S]"""
        sizes = np.array(grid.micro_batch, dtype=float)[:, None]
        self._sequence = model.workload.seq_length * sizes / grid.layout.sequence_parallel_size
        """[B, 1] tokens of a micro-batch that are as much as the part of one sequence-parallel rank."""
        self._token_slice = self._sequence / self._num_token_slices
        """[B, S] tokens of a token slice."""
        self._offloads = np.array([offload for _, offload in grid.recompute])[:, None]
        """[R, 1] whether token slices wait on hosts."""
        self._of_stages = np.array([recompute == "stage" for recompute, _ in grid.recompute])[:, None]
        """[R, 1] whether stages are computed again."""
        own = np.array([1 / grid.granularity(parallel) for parallel in grid.sequence_parallel])
        self._input_sequences = own * grid.layout.sequence_parallel_size * self._of_stages
        """[R, Q] part of a rank's tokens that it keeps of a stage input."""
        sequences = (sizes / self._num_token_slices)[:, :, None, None] * own
        self._messages = np.asarray(model.message_bytes(grid.layout.pipeline_parallel_size, sequences))
        """[B, S, 1, Q] bytes."""

    @cached_property
    def _of_kinds(self) -> Floats:
        """[fields of `TokenMemory`, K, R, Q] bytes of a token of one sequence."""
        grid, of = self._grid, self._model.token_bytes
        of_kinds = [
            [of(grid.layout, recompute, parallel, grid.kept_keys) for parallel in grid.sequence_parallel]
            for recompute, _ in grid.recompute
        ]
        return np.moveaxis(np.array(of_kinds), (0, 1), (2, 3))

    def fullness(
        self, groups: RankGroups, counts: Mapping[tuple[int, int], LayerCounts], possible: Flags | None = None
    ) -> Floats:
        """Return a lower bound of the fullest device of each strategy, as a share of its memory: [grid].

        Args:
            counts: by model chunks and place on the axis `partition`.
            possible: [O, P] pairs of a schedule and a partition; others, and strategies with too large states, have
                infinity. None = all have their share.
        """
        grid, overheads = self._grid, self._model.overheads
        shares = np.full(grid.shape, np.inf)
        looked_at = [_ranks_to_look_at(found) for found in counts.values()]
        ends = np.cumsum([len(ranks) for ranks in looked_at])
        usable = np.array([device.memory_bytes for device in groups.smallest]) * overheads.usable_share
        # Ranks lead, so that numbers of each broadcast against the axes of the grid.
        capacity = usable[np.concatenate(looked_at)].reshape(-1, 1, 1, 1, 1)
        parameters, of_experts = (
            np.concatenate([part[ranks] for part, ranks in zip(parts, looked_at, strict=True)]).reshape(capacity.shape)
            for parts in zip(*((found.parameters, found.expert_parameters) for found in counts.values()), strict=True)
        )
        for zero, (zero_stage, size) in enumerate(grid.zero):
            states = self._model.states(
                parameters, of_experts, layout=grid.layout, zero_stage=zero_stage, zero_shard_size=size
            )
            too_large = total_bytes(states, overheads) > capacity
            for ((model_chunks, place), found), ranks, end in zip(counts.items(), looked_at, ends, strict=True):
                rows = slice(end - len(ranks), end)
                if possible is not None and np.any(too_large[rows]):
                    continue
                of_ranks = Counted(*(part if np.ndim(part) == 0 else np.asarray(part)[rows] for part in states))
                for order, (schedule, its_model_chunks) in enumerate(grid.order):
                    if its_model_chunks == model_chunks and (possible is None or possible[order, place]):
                        total = self._total(found, ranks, schedule, zero, of_ranks)
                        shares[order, place, ..., zero] = np.max(total / capacity[rows], axis=0)
        return shares

    def _total(self, counts: LayerCounts, ranks: list[int], schedule: str, zero: int, states: Counted) -> Floats:
        """[ranks, B, S, R, Q] bytes at the peak, at least."""
        key = counts.per_stage.tobytes(), schedule
        if key not in self._known_held:
            self._known_held[key] = self._held(counts, ranks, schedule)
        if (*key, zero) not in self._known_totals:
            counted = states.holding(self._known_held[key], self._messages)
            self._known_totals[*key, zero] = np.asarray(total_bytes(counted, self._model.overheads))
        return self._known_totals[*key, zero]

    def _held(self, counts: LayerCounts, ranks: list[int], schedule: str) -> Held:
        """[ranks, B, S, R, Q] bytes that come and go, at least."""
        num_ranks = len(counts.parameters)
        of_stage = self._model.stage_bytes(counts, self._of_kinds, input_sequences=self._input_sequences)
        model_chunks = len(counts.per_stage) // num_ranks
        tokens = self._live_tokens(schedule, num_ranks, model_chunks, tuple(ranks))
        # Of a rank's live token slices, those whose weight gradients wait: as many as there are ranks before it.
        delayed = np.array(ranks)[:, None, None] if schedule == "zero-bubble" else 0
        delayed = np.minimum(delayed, self._micro_batches * self._num_token_slices - 1)
        turned = np.broadcast_to((self._token_slice * delayed)[..., None], tokens.shape)

        def of_ranks(part: ScalarOrArray) -> Floats:
            """[stages, R, Q] -> [ranks, V, R, Q]."""
            part = np.asarray(part)
            return np.asarray(part.reshape(model_chunks, num_ranks, *part.shape[1:])[:, ranks].swapaxes(0, 1))

        def held(part: ScalarOrArray, tokens: Floats) -> Floats:
            """[stages, R, Q] bytes of a token, [ranks, B, S, V] tokens -> [ranks, B, S, R, Q]."""
            found = of_ranks(part)
            flat = tokens @ found.reshape(len(ranks), 1, model_chunks, -1)
            return np.asarray(flat.reshape(*tokens.shape[:3], *found.shape[2:]))

        # The first backward is one of the last stage of the rank.
        last = TokenMemory(*(of_ranks(part)[:, -1, None, None] for part in of_stage.token))
        whole, part = self._sequence[:, :, None, None], self._token_slice[:, :, None, None]
        before = whole - part
        sequences = np.where(before > 0, whole / self._model.workload.seq_length, 0.0)
        kept = held(of_stage.token.activations + of_stage.token.key_values, tokens)
        if schedule == "zero-bubble":
            kept = kept - held(of_stage.token.freed_by_input_gradient + of_stage.token.key_values, turned)
        if self._offloads.any():
            # This backward reads the keys and values of the whole sequence. The host has room for some of the rest.
            inputs = of_ranks(of_stage.inputs)[:, -1, None, None]
            read = whole * last.key_values + part * (last.activations - inputs)
            kept = np.where(self._offloads, np.maximum(read, kept - host_bytes(self._model.cluster)), kept)
        head_working = of_ranks(of_stage.head_working)[:, -1, None, None]
        # Logits of a recomputed stage are there only in its backward.
        logits = np.where(self._of_stages, part * last.logits, held(of_stage.token.logits, tokens - turned))
        return Held(
            activations=kept,
            key_values=before * last.key_value_gradients + sequences * last.window_gradients,
            logits=np.minimum(logits, of_stage.limits.kept),
            working=working_bytes(part, last, head_working, of_stage.limits, whole / self._model.workload.seq_length),
        )

    def _live_tokens_of(self, schedule: str, num_ranks: int, model_chunks: int, ranks: tuple[int, ...]) -> Floats:
        """[ranks, B, S, V] tokens that are live on each stage of a rank when the rank holds most."""
        sizes = self._micro_batches, self._num_token_slices
        live = live_token_slices(schedule, num_ranks, model_chunks, np.array(ranks)[:, None, None], *sizes)
        on_stages = _live_per_model_chunk(live, model_chunks, group_size(num_ranks, *sizes), self._num_token_slices)
        return np.asarray(self._token_slice[..., None] * on_stages)


def _ranks_to_look_at(counts: LayerCounts) -> list[int]:
    last = len(counts.parameters) - 1
    whole = counts.parameters + counts.expert_parameters
    fullest = (int(np.argmax(each)) for each in (counts.parameters, whole, counts.per_rank.sum(axis=1)))
    # Of equal ranks the first holds most with 1f1b, the last with zero-bubble.
    return sorted({0, last, *fullest, last - int(np.argmax(whole[::-1]))})


def live_token_slices(
    schedule: str,
    num_ranks: int,
    model_chunks: int,
    rank: int | NDArray[np.int64],
    num_micro_batches: Floats,
    num_token_slices: Floats,
) -> Floats:
    """Return the most token slices, of one stage each, that are live on a rank at once; arguments broadcast."""
    most = model_chunks * num_micro_batches * num_token_slices + 0.0 * np.asarray(rank)
    if schedule in KEEPING_ALL:
        return most
    if schedule == "zero-bubble":
        return np.minimum(num_ranks - 1 + num_token_slices, most)
    if schedule == "interleaved" and model_chunks > 1:
        passes = (model_chunks - 1) * group_size(num_ranks, num_micro_batches, num_token_slices) * num_token_slices
        return np.minimum(passes + num_token_slices + 2 * (num_ranks - rank - 1), most)
    return np.minimum(num_ranks - rank - 1 + num_token_slices, most)


def group_size(num_ranks: int, num_micro_batches: Floats, num_token_slices: Floats) -> Floats:
    """Return the micro-batches of the longest group in a model chunk (`schedules.interleaved`); arguments broadcast."""
    least = np.ceil(num_ranks / num_token_slices)
    return np.asarray(np.ceil(num_micro_batches / np.maximum(num_micro_batches // least, 1)))


def _live_per_model_chunk(live: Floats, model_chunks: int, group: Floats, num_token_slices: Floats) -> Floats:
    """[..., V] of the live token slices, those on each of a rank's stages: groups pass one stage after the other."""
    if model_chunks == 1:
        return live[..., None]
    each = group * num_token_slices
    rounds = live // (model_chunks * each)
    rest = live - rounds * model_chunks * each
    before = np.arange(model_chunks) * each[..., None]
    return np.asarray((rounds * each)[..., None] + np.clip(rest[..., None] - before, 0, each[..., None]))


FITS = "memory of the devices"
"""Name of the rejection of strategies that need more."""

HEADROOM = "memory kept free (--memory-headroom)"
"""Name of the rejection of strategies that fit the devices, but do not leave the headroom free."""

COARSE_SUMS = "bf16 gradients are added up in fp32 (ZeRO stage 1; fix stage 0 to have it)"
"""Name of the rejection of strategies that add gradients up with fewer digits; `--zero-stage 0` keeps them."""

NEEDS_NO_HOSTS = "token slices wait on hosts only where devices are short of memory"
"""Name of the rejection of strategies with host copies that the devices have no need of."""

EASILY = 0.9
"""Share of the room for a strategy that its memory, by a bound, may take for copies to be of no use."""


@dataclass(frozen=True)
class PricedGrid:
    """The strategies of a grid that may win."""

    grid: StrategyGrid
    node_order: int
    partitions: dict[tuple[int, int], StagePartition]
    """Bounds of stages by model chunks and place on the axis `partition`."""
    places: NDArray[np.int64]
    """[n] flat index in the grid of each strategy that may fit the devices."""
    fullness: Floats
    """[n] share of the fullest device that it takes at least; those that leave no headroom free cannot win."""
    estimate: Floats
    """[n] seconds in closed form."""
    bound: Floats
    """[n] seconds at least."""

    def strategy(self, index: int, problem: SearchProblem) -> Strategy:
        """Return a strategy, with its stage partition."""
        place = tuple(int(each) for each in np.unravel_index(self.places[index], self.grid.shape))
        strategy = self.grid.strategy(place, problem)
        if self.grid.partition[place[1]] == SOLVED:
            bounds = self.partitions[strategy.num_model_chunks, place[1]].bounds
            strategy = replace(strategy, stage_partition=bounds)
        return strategy


def price_space(
    problem: SearchProblem,
    choices: Choices,
    pricings: Sequence[Pricing],
    counts: SearchCounts,
    progress: ProgressCallback = no_progress,
) -> Iterator[PricedGrid]:
    """Yield the prices of all strategies that keep the rules, on every node order of `pricings`, a grid at a time.

    Arrays of a grid have the shape [micro-batch sizes, token slices, ...] of its `StrategyGrid`.
    """
    known: dict[HardwareEfficiency, OpTables] = {}
    tables = [
        known.setdefault(each.cost_model.efficiency, OpTables(each.cost_model, choices["micro_batch_size"]))
        for each in pricings
    ]
    for found in legal_grids(problem, choices, counts, progress):
        if _are_states_too_large(found.grid, pricings[0]):
            counts.priced += int(found.legal.sum())
            counts.reject(FITS, int(found.legal.sum()))
            continue
        flags = np.zeros((4, *found.grid.shape), dtype=bool)
        memory = GridMemory(found.grid, pricings[0].memory_model)
        for order, (pricing, table) in enumerate(zip(pricings, tables, strict=True)):
            priced, of_order = _price(problem, found, order, pricing, table, memory)
            flags |= of_order
            if priced is not None:
                yield priced
        different, fitting, roomy, helped = flags
        counts.priced += int(different.sum())
        fine = np.broadcast_to(keeps_digits(found.grid, problem.precision), different.shape)
        left = found.legal
        for name, kept in (
            (SAME_STAGES, different),
            (FITS, fitting),
            (HEADROOM, roomy),
            (COARSE_SUMS, fine),
            (NEEDS_NO_HOSTS, helped),
        ):
            counts.reject(name, int((left & ~kept).sum()))
            left = left & kept
        for zero, row in enumerate(found.grid.rows):
            counts.variants[row] += int(left[..., zero].sum())


def _are_states_too_large(grid: StrategyGrid, pricing: Pricing) -> bool:
    """Whether states need more than the largest device has, however layers are dealt: the mean of the ranks does."""
    layout, model = grid.layout, pricing.memory_model
    everything = StagePartition((0, model.workload.num_dealt_layers))
    whole = model.counter.count(everything, 1, layout.tensor_parallel_size, layout.expert_parallel_size)
    parameters, of_experts = (
        part / layout.pipeline_parallel_size for part in (whole.parameters, whole.expert_parameters)
    )
    largest = max(node.device.memory_bytes for node in pricing.cluster.nodes) * model.overheads.usable_share
    states = (
        model.states(parameters, of_experts, layout=layout, zero_stage=stage, zero_shard_size=size)
        for stage, size in grid.zero
    )
    # Buckets do not grow with the parameters of a rank.
    return all(np.all(total_bytes(each._replace(buffers=0.0), model.overheads) > largest) for each in states)


def keeps_digits(grid: StrategyGrid, precision: str) -> Flags:
    """Return which ZeRO stages of a grid add gradients up as exactly as any stage of it: [zero].

    DeepSpeed adds up bf16 gradients in fp32 only under ZeRO 1 (`megatron_terapipe/training/deepspeed_config.py`).
    """
    stages = [stage for stage, _ in grid.zero]
    coarse = precision == "bf16" and 1 in stages
    return np.array([not coarse or stage == 1 for stage in stages])


def _price(
    problem: SearchProblem, found: LegalGrid, order: int, pricing: Pricing, tables: OpTables, memory: GridMemory
) -> tuple[PricedGrid | None, Flags]:
    """Return the strategies of a grid that fit; [4, grid] which differ, fit, fit with headroom, and `_helped`."""
    grid = found.grid
    cost_model = pricing.cost_model
    groups = cost_model.groups_of(grid.layout)
    partitions = _partitions(problem, found, groups, tables, cost_model.counter)
    layout = grid.layout
    sizes = layout.pipeline_parallel_size, layout.tensor_parallel_size, layout.expert_parallel_size
    counts = {key: cost_model.counter.count(partition, *sizes) for key, partition in partitions.items()}
    # Pairs of a schedule and a rule that have a stage partition of their own.
    own = [
        [(model_chunks, place) in partitions for place in range(len(grid.partition))] for _, model_chunks in grid.order
    ]
    legal = found.legal & grid.along(("order", "partition"), own)
    fullness = memory.fullness(groups, counts, _pairs(legal))
    fits, roomy = legal & (fullness <= 1), legal & (fullness <= 1 - problem.memory_headroom)
    if not fits.any():
        return None, np.stack([legal, fits, roomy, fits])
    helped = _helped(grid, fullness <= EASILY * (1 - problem.memory_headroom))
    estimate, bound = grid_times(grid, groups, cost_model, tables, counts, pairs=_pairs(fits))
    places = np.flatnonzero(fits & helped & keeps_digits(grid, problem.precision))
    of_places = fullness.ravel()[places], estimate.ravel()[places], bound.ravel()[places]
    priced = PricedGrid(grid, order, partitions, places, *of_places) if len(places) else None
    return priced, np.stack([legal, fits, roomy, helped])


def _helped(grid: StrategyGrid, easily: Flags) -> Flags:
    """[grid] which strategies need their host copies: without them the same strategy has not easily room.

    Copies take no time off any op. Where flags only allow offload, there is no plain strategy to compare with.

    Args:
        easily: [grid] which strategies have.
    """
    helped = np.ones(grid.shape, dtype=bool)
    without = {mode: place for place, (mode, offload) in enumerate(grid.recompute) if not offload}
    for place, (mode, offload) in enumerate(grid.recompute):
        if offload and mode in without:
            helped[:, :, :, :, place] = ~easily[:, :, :, :, without[mode]]
    return helped


def _pairs(flags: Flags) -> Flags:
    """[O, P] whether any strategy with a schedule and a partition is flagged."""
    return np.asarray(flags.any(axis=(2, 3, 4, 5, 6)))


def _partitions(
    problem: SearchProblem, legal: LegalGrid, groups: RankGroups, tables: OpTables, counter: LayerCounter
) -> dict[tuple[int, int], StagePartition]:
    """Return the stages of every pair of model chunks and partition rule that a legal strategy has."""
    grid = legal.grid
    ranks = grid.layout.pipeline_parallel_size
    pairs = _pairs(legal.legal)
    found: dict[tuple[int, int], StagePartition] = {}
    times: Floats | None = None
    axes: tuple[Axis, ...] = ("micro_batch", "token_slices", "recompute", "sequence_parallel")
    one_value: dict[str, Any] = {axis: getattr(grid, axis)[:1] for axis in axes}
    for model_chunks in dict.fromkeys(model_chunks for _, model_chunks in grid.order):
        rows = [row for row, (_, its_model_chunks) in enumerate(grid.order) if its_model_chunks == model_chunks]
        for place, rule in enumerate(grid.partition):
            if not pairs[rows, place].any():
                continue
            if rule == SOLVED:
                if times is None:
                    times = layer_times(counter, replace(grid, **one_value), groups, tables)
                partition = balanced_partition(problem, times, ranks, model_chunks)
                if all(key[0] != model_chunks or partition != other for key, other in found.items()):
                    found[model_chunks, place] = partition
            else:
                found[model_chunks, place] = problem.partition(rule, ranks * model_chunks)
    return found
