"""Lower bounds of the memory of the fullest pipeline ranks of every strategy of a grid.

The ranks at the ends are counted, and those with most parameters or layers: one of them is the fullest, and a bound
is valid whichever ranks are left out. A rank holds most as a backward starts after its last warm-up forward, when

    1f1b          min(P - i - 1 + S, M S)                                       (arXiv 2406.03488 section 3.2)
    zero-bubble   min(P - 1 + S, M S)                                           (arXiv 2401.10241 section 3, ZB-H1)
    interleaved   min((V - 1) G S + S - 1 + 2 (P - i - 1) + 1, V M S)           (`plan.schedules`, groups of G)
    gpipe         V M S, and so breadth-first

token slices are live on rank i. `price.activations.peak_held` counts the same op by op for strategies that may win.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.schedules import KEEPING_ALL
from megatron_terapipe.search.machine.software import ELEMENT_BYTES
from megatron_terapipe.search.price.activations import SCORE_LIMIT, Held, TokenMemory, logit_limits
from megatron_terapipe.search.price.links import RankGroups
from megatron_terapipe.search.price.memory import Counted, MemoryModel, stage_input_elements, total_bytes
from megatron_terapipe.search.price.stages import LayerCounts
from megatron_terapipe.search.rank.strategy_grid import StrategyGrid

Floats = NDArray[np.float64]


class GridMemory:
    """The strategies of one grid that may fit. Bytes are counted once for each stage partition, and kept."""

    def __init__(self, grid: StrategyGrid, model: MemoryModel) -> None:
        self._grid, self._model = grid, model
        self._known_held: dict[tuple[object, ...], Held] = {}
        self._known_totals: dict[tuple[object, ...], Floats] = {}
        self._known_live: dict[tuple[object, ...], Floats] = {}
        self._micro_batches = grid.num_micro_batches.reshape(-1, 1).astype(float)
        """[B, 1]"""
        self._num_token_slices = np.array(grid.token_slices, dtype=float)[None, :]
        """[1, S]"""
        sizes = np.array(grid.micro_batch, dtype=float)[:, None]
        self._sequence = model.workload.seq_length * sizes / grid.layout.sequence_parallel_size
        """[B, 1] tokens of a micro-batch that are as much as the part of one sequence-parallel rank."""
        self._token_slice = self._sequence / self._num_token_slices
        """[B, S] tokens of a token slice."""
        tables = [
            [
                model.token_bytes(grid.layout, recompute, parallel, grid.key_value_gradients)
                for parallel in grid.sequence_parallel
            ]
            for recompute, _ in grid.recompute
        ]
        each = TokenMemory(*np.moveaxis(np.array(tables), (0, 1), (2, 3)))
        self._key_values, self._activations = np.asarray(each.key_values), np.asarray(each.activations)
        """Each [K, R, Q] bytes of a token of one sequence."""
        self._offloads = np.array([offload for _, offload in grid.recompute])[:, None]
        """[R, 1] whether token slices wait on hosts."""
        self._kept, logits = np.asarray(each.activations + each.key_values), np.asarray(each.logits)
        self._recomputed = np.asarray(each.recomputed)
        """Each [K, R, Q] bytes of a token of one sequence: kept; computed again with the whole stage."""
        self._of_stages = np.array([recompute == "stage" for recompute, _ in grid.recompute])[:, None]
        """[R, 1] whether stages are computed again."""
        self._logits = np.where(self._of_stages, 0.0, logits)
        """[K, R, Q] bytes of logits of a token of one sequence that wait for the backward."""
        self._gradients, self._window_gradients = (
            np.asarray(each.key_value_gradients),
            np.asarray(each.window_gradients),
        )
        """Each [K, R, Q] bytes of gradients of keys and values: of a token, and of a sequence in a sliding window."""
        own = np.array([1 / grid.granularity(parallel) for parallel in grid.sequence_parallel])
        self._shared_by = own * grid.layout.sequence_parallel_size
        """[Q] part of a rank's tokens that it has of a stage input."""
        sequences = (sizes / self._num_token_slices)[:, :, None, None] * own
        self._messages = np.asarray(model.message_bytes(grid.layout.pipeline_parallel_size, sequences))
        """[B, S, 1, Q] bytes."""
        self._limits = logit_limits(model.software, ELEMENT_BYTES[model.precision])
        tokens = self._token_slice[:, :, None, None]
        working, scores = (tokens * np.asarray(part)[:, None, None] for part in (each.working, each.scores))
        working += np.minimum(scores, SCORE_LIMIT)
        is_head = np.any(logits, axis=(1, 2))
        # Logits that are computed only in the backward are held by it, too.
        held = np.where(self._of_stages, tokens * logits[is_head][:, None, None], 0.0)
        working[is_head] = np.minimum(working[is_head], self._limits.working) + np.minimum(held, self._limits.kept)
        self._working = working
        """[K, B, S, R, Q] bytes that the backward of each kind of layer holds while it runs."""

    def fullness(
        self, groups: RankGroups, counts: Mapping[tuple[int, int], LayerCounts], *, only_possible: bool = False
    ) -> Floats:
        """Return a lower bound of the fullest device of each strategy, as a share of its memory: [grid].

        Args:
            counts: by model chunks and place on the axis `partition`.
            only_possible: strategies with too large states have infinity.
        """
        grid, overheads = self._grid, self._model.overheads
        shares = np.full(grid.shape, np.inf)
        smallest = np.array([device.memory_bytes for device in groups.smallest])
        for (model_chunks, place), found in counts.items():
            ranks = _ranks_to_look_at(found)
            capacity = smallest[ranks] * overheads.usable_share
            for zero, (zero_stage, size) in enumerate(grid.zero):
                parameters = found.parameters[ranks], found.expert_parameters[ranks]
                states = self._model.states(
                    *parameters, layout=grid.layout, zero_stage=zero_stage, zero_shard_size=size
                )
                if only_possible and np.any(total_bytes(states, overheads) > capacity):
                    continue
                for order, (schedule, its_model_chunks) in enumerate(grid.order):
                    if its_model_chunks == model_chunks:
                        total = self._total(found, ranks, schedule, zero, states)
                        # Ranks lead, so that numbers of each broadcast against the axes of the grid.
                        shares[order, place, ..., zero] = np.max(total / capacity.reshape(-1, 1, 1, 1, 1), axis=0)
        return shares

    def _total(self, counts: LayerCounts, ranks: list[int], schedule: str, zero: int, states: Counted) -> Floats:
        """[ranks, B, S, R, Q] bytes at the peak, at least."""
        key = counts.per_stage.tobytes(), schedule
        if key not in self._known_held:
            self._known_held[key] = self._held(counts, ranks, schedule)
        if (*key, zero) not in self._known_totals:
            lead = (-1, 1, 1, 1, 1)
            columns = Counted(*(part if np.ndim(part) == 0 else np.reshape(part, lead) for part in states))
            counted = columns.holding(self._known_held[key], self._messages)
            self._known_totals[*key, zero] = np.asarray(total_bytes(counted, self._model.overheads))
        return self._known_totals[*key, zero]

    def _held(self, counts: LayerCounts, ranks: list[int], schedule: str) -> Held:
        """[ranks, B, S, R, Q] bytes that come and go, at least."""
        num_ranks, kinds = len(counts.parameters), counts.per_stage.shape[1]
        stages = counts.per_stage.reshape(-1, num_ranks, kinds)[:, ranks].swapaxes(0, 1)
        tokens = self._live_tokens(schedule, num_ranks, stages.shape[1], tuple(ranks))

        def on_all_stages(each: Floats) -> Floats:
            """[ranks, B, S, V] tokens x [K, R, Q] bytes -> [ranks, B, S, R, Q]."""
            of_stage = (stages @ each.reshape(kinds, -1))[:, None]
            return np.asarray((tokens @ of_stage).reshape(*tokens.shape[:3], *each.shape[1:]))

        element = ELEMENT_BYTES[self._model.precision]
        inputs = element * stage_input_elements(self._model.workload, counts).reshape(-1, num_ranks)[:, ranks].T
        of_inputs = np.einsum("rbsv,rv->rbs", tokens, inputs)[..., None, None] * self._shared_by * self._of_stages
        last = stages[:, -1]
        gradients, of_windows = (
            (last @ each.reshape(kinds, -1)).reshape(len(ranks), 1, 1, *each.shape[1:])
            for each in (self._gradients, self._window_gradients)
        )
        again = self._token_slice[:, :, None, None] * (last @ self._recomputed.reshape(kinds, -1)).reshape(
            len(ranks), 1, 1, *self._recomputed.shape[1:]
        )
        # The first backward is one of the last stage of the rank.
        before = self._sequence - self._token_slice
        sequences = np.where(before > 0, self._sequence / self._model.workload.seq_length, 0.0)
        waiting = before[:, :, None, None] * gradients + sequences[:, :, None, None] * of_windows
        kept = on_all_stages(self._kept) + of_inputs
        if self._offloads.any():
            # All else may wait on the host: this backward reads the keys and values of the whole sequence.
            read, own = (
                (last @ part.reshape(kinds, -1)).reshape(len(ranks), 1, 1, *part.shape[1:])
                for part in (self._key_values, self._activations)
            )
            least = self._sequence[:, :, None, None] * read + self._token_slice[:, :, None, None] * own
            kept = np.where(self._offloads, least, kept)
        return Held(
            activations=kept,
            key_values=waiting,
            logits=np.minimum(on_all_stages(self._logits), self._limits.kept),
            working=np.array([self._working[row > 0].max(axis=0) for row in last]) + again,
        )

    def _live_tokens(self, schedule: str, num_ranks: int, model_chunks: int, ranks: tuple[int, ...]) -> Floats:
        """[ranks, B, S, V] tokens that are live on each stage of a rank when the rank holds most."""
        key = schedule, model_chunks, ranks
        if key not in self._known_live:
            sizes = self._micro_batches, self._num_token_slices
            live = live_token_slices(schedule, num_ranks, model_chunks, np.array(ranks)[:, None, None], *sizes)
            group = group_size(num_ranks, *sizes)
            on_stages = _live_per_model_chunk(live, model_chunks, group, self._num_token_slices)
            self._known_live[key] = self._token_slice[..., None] * on_stages
        return self._known_live[key]


def _ranks_to_look_at(counts: LayerCounts) -> list[int]:
    ranks = len(counts.parameters)
    return sorted({0, ranks - 1, int(np.argmax(counts.parameters)), int(np.argmax(counts.per_rank.sum(axis=1)))})


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
