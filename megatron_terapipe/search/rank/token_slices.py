"""How many token slices, and how long: the split with the shortest predicted iteration under the schedule that runs.

    all numbers --gpipe's formula--> a few --simulated--> best three --searched--> all of the few --priced--> best

The trainer's `--token-slices auto`, the command `slices` and the finalists of `rank` all call `solve_cut`, which looks
times of token slices up in tables (`TabulatedCosts`): solvers price thousands of cuts.

For each number of token slices balanced cuts and the formula of gpipe give an estimate. Of the most promising
numbers the cut that is best for gpipe is simulated with the schedule that runs, and the best numbers are searched
further: tokens move between token slices as long as the simulated step gets shorter
(`plan.solve.token_slices`). The results are priced by the cost model like any other strategy. The answer depends only
on the arguments, not on time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedules import OPTIMISED, Schedule, memory_of_1f1b, schedule_named
from deepspeed_ext.plan.simulate.arrays import Numbers
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, TokenSliceCosts, bounds_of
from deepspeed_ext.plan.solve.token_slices import CutEvaluation, FixedSchedule, OptimisedOrders, search_cuts
from megatron_terapipe.config.flops import granularity_of
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.makespan import FewerMicroBatches
from megatron_terapipe.search.price.stages import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    SPLIT_SCHEDULES,
    WEIGHT_GRADIENT,
    PlacedStrategy,
    different_rows,
    kind_of_rank,
    op_sizes,
    pipeline_shape,
)
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True, eq=False)
class TabulatedCosts:
    """Times of token slices whose bounds are points of a grid; a `TokenSliceCosts`. Make it with `of`."""

    table: Numbers
    """[3, U, points, points] seconds of F, BI and BW of a stage of each of U kinds, from point to point."""
    kind_of_stage: NDArray[np.int64]
    """[stages] which kind each stage is."""
    sending: Numbers
    """[2, stages, 2] seconds by which messages make F and B longer: fixed, and by token."""
    index: NDArray[np.int64]
    """[seq_length + 1] number of the point at each position."""

    def __call__(self, stages: Sequence[int], starts: Numbers, ends: Numbers) -> Numbers:
        """See `TokenSliceCosts`: [3, stages, *shape of starts]."""
        which = np.asarray(stages, np.int64)
        kinds = self.kind_of_stage[which].reshape(-1, *(1,) * np.ndim(starts))
        times = self.table[:, kinds, self.index[starts], self.index[ends]]
        fixed, by_token = np.moveaxis(self.sending[:, which], -1, 0).reshape(2, 2, -1, *(1,) * np.ndim(starts))
        times[:2] += fixed + by_token * (np.asarray(ends) - starts)
        return times

    def busiest_and_others(self, num_ranks: int) -> "TabulatedCosts":
        """Two stages in place of a pipeline: its busiest rank, and the mean of all others.

        A rank with several model chunks has the mean of their times.
        """
        of_rank = np.arange(len(self.kind_of_stage)) % num_ranks
        model_chunks = len(of_rank) // num_ranks
        shares = np.zeros((num_ranks, self.table.shape[1]))
        np.add.at(shares, (of_rank, self.kind_of_stage), 1 / model_chunks)
        sending = self.sending.reshape(2, model_chunks, num_ranks, 2).mean(axis=1)
        whole = shares @ self.table[:, :, 0, -1].sum(axis=0) + (sending @ [1, len(self.index) - 1]).sum(axis=0)
        busiest = np.arange(num_ranks) == whole.argmax()
        others = ~busiest if num_ranks > 1 else busiest
        weights = np.stack([shares[ranks].mean(axis=0) for ranks in (busiest, others)])
        table = np.einsum("uk,tkse->tuse", weights, self.table)
        joined = np.stack([sending[:, ranks].mean(axis=1) for ranks in (busiest, others)], axis=1)
        return TabulatedCosts(table, np.arange(2), joined, self.index)

    @classmethod
    def of(cls, cost_model: CostModel, strategy: Strategy, grid: CutGrid) -> "TabulatedCosts":
        """Return all times of a cost model at once, [points, points] for the token slices between two places."""
        points = grid.points
        first, last = np.triu_indices(len(points), 1)
        placed = cost_model.placed(strategy)
        sizes = op_sizes(placed.strategy, points[first] / grid.seq_length, points[last] / grid.seq_length)
        # The slowest device is the slowest with all tokens in one token slice.
        whole = int(np.flatnonzero((first == 0) & (last == len(points) - 1))[0])
        stages, kind_of_stage = _different_stages(placed)
        # Times of layers are kept, for the same strategy with other layers on its stages.
        ops = cost_model.priced_stages(placed, sizes, (*placed.key, grid), stages=stages.tolist(), whole=whole)
        if strategy.schedule in SPLIT_SCHEDULES:
            times = ops[[FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT]]
        else:
            times = np.array([ops[FORWARD], ops[BACKWARD], np.zeros_like(ops[FORWARD])])
        table = np.zeros((3, times.shape[1], len(points), len(points)))
        table[:, :, first, last] = times
        index = np.searchsorted(points, np.arange(grid.seq_length + 1))
        silent = np.zeros((2, len(kind_of_stage), 2))
        costs = cls(table, kind_of_stage, silent, index)
        if cost_model.software.communication.overlaps_transfers or len(kind_of_stage) == 1 or len(points) < 3:
            return costs
        return replace(costs, sending=_sending(cost_model, strategy, costs, points))


def _different_stages(placed: PlacedStrategy) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first stage of each kind, and [stages] the kind of each: the same layers, devices and links."""
    layers = placed.counts.per_stage
    return different_rows(np.column_stack([np.resize(kind_of_rank(placed.groups), len(layers)), layers]))


def _sending(cost_model: CostModel, strategy: Strategy, costs: TabulatedCosts, points: Numbers) -> Numbers:
    """By how much messages that block make ops longer: a straight line in the tokens, through two lengths."""
    longer = []
    short, whole = int(points[1]), int(points[-1])
    for cut in ((whole,), (short, whole - short)):
        priced = cost_model.pipeline_costs(replace(strategy, num_token_slices=len(cut), token_slices=cut))
        ops = costs(range(len(costs.kind_of_stage)), np.zeros(1, np.int64), np.array(cut[:1]))
        longer.append(np.array([priced.forward, priced.backward])[..., 0] - ops[:2, :, 0])
    by_token = (longer[0] - longer[1]) / (whole - short)
    return np.stack([longer[1] - by_token * short, by_token], axis=-1)


MOST_OPS = 4_000  # ops that are simulated for each cut: less than a tenth of a millisecond


class ExtrapolatedSchedule(CutEvaluation):
    """Judges cuts by one schedule, with fewer micro-batches where there are many."""

    def __init__(
        self, schedule: Schedule, shape: PipelineShape, costs: TokenSliceCosts, transfer: float | TransferCosts
    ) -> None:
        """Prepare."""
        self.num_ops = 0
        self._fewer = FewerMicroBatches.of(shape, MOST_OPS)
        self._parts = {
            number: FixedSchedule(schedule, replace(shape, num_micro_batches=number), costs, transfer=transfer)
            for number in self._fewer.numbers
        }

    def __call__(self, cut: TokenSlices) -> float:
        """Makespan with a cut, in seconds."""
        makespan = self._fewer.makespan(lambda number: self._parts[number](cut))
        self.num_ops = sum(part.num_ops for part in self._parts.values())
        return makespan


COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128)
"""Numbers of token slices that are tried where none are given."""

MOST_POINTS = 256  # places to cut at, at most: lengths are multiples of more tokens in longer sequences

MOST_TOKENS, MOST_COUNT = 20_000_000, 512
"""Tokens of a sequence, and token slices, for which lengths are found at most: tables have a row for each place."""

NUM_SIMULATED = 4  # numbers of token slices above 1 that are simulated and priced where none are given
NUM_SEARCHED = 3  # numbers of token slices that are searched further; the others keep the better of two cuts
EFFORT = 0.04  # effort of each search, in the unit of `plan.solve.token_slices`

SKETCHED = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Shares of attention for which cuts are balanced, to estimate a number of token slices and to begin a search."""

OPTIMISED_EFFORT = 0.1  # effort for an `optimised` schedule, each cut of which takes several list schedules

OPTIMISED_ROUNDS = 2
"""Micro-batches of each rank with which cuts for an `optimised` schedule are compared: enough to fill and to drain."""


class PricedCut(NamedTuple):
    """A cut and the seconds of an iteration with it."""

    token_slices: tuple[int, ...]
    iteration_time_s: float


class SolvedCut(NamedTuple):
    """The best cut."""

    token_slices: tuple[int, ...]
    iteration_time_s: float
    alternatives: tuple[PricedCut, ...]
    """A good cut of each number of token slices that was priced, the fewest first; the best among them."""


def solve_cut(
    cost_model: CostModel,
    strategy: Strategy,
    *,
    counts: Sequence[int] | None = None,
    granularity: int | None = None,
    memory_limit: float | None = None,
    model_chunk_placement: Placement = Placement.LOOPED,
) -> SolvedCut:
    """Find the cut for a strategy; token slices that it has already do not matter.

    Args:
        counts: numbers of token slices to price, every one of them; None = 1, the most promising of `COUNTS`, and
            those next to the best. Numbers that the sequence or the schedule has no room for are left out.
        granularity: lengths are multiples of this; None = as the trainer's own cuts: of 16 tokens where token slices
            are long, and of the tensor-parallel size if ranks share tokens.
        memory_limit: activations of one micro-batch that a rank may keep under an `optimised` schedule; None = as many
            as 1f1b.
    """
    seq_length = cost_model.workload.seq_length
    if seq_length > MOST_TOKENS or (counts and max(counts) > MOST_COUNT):
        raise ConfigError(
            f"strategy: lengths are found for sequences of {MOST_TOKENS:,} tokens and {MOST_COUNT} token slices at "
            f"most, not for {seq_length:,} tokens and {max(counts or (1,)):,}: list the lengths, or take balanced ones"
        )
    solver = _Solver(cost_model, strategy, granularity, memory_limit, model_chunk_placement)
    wanted = COUNTS if counts is None else sorted(set(counts))
    if not cost_model.workload.can_cut_tokens:
        wanted = [count for count in wanted if count == 1]
    if counts is None:
        sketched = {count: time_s for count in wanted if (time_s := solver.sketched_s(count)) is not None}
        wanted = sorted({1} | set(sorted(sketched, key=sketched.__getitem__)[:NUM_SIMULATED]))
    found = solver.simulated(wanted)
    if not found:
        raise ConfigError(
            f"strategy: a sequence of {cost_model.workload.seq_length} tokens cannot be cut into "
            f"{' or '.join(map(str, wanted))} token slices with schedule {strategy.schedule!r}{solver.refusal}: "
            "give another number"
        )
    for count in _most_promising(found)[:NUM_SEARCHED]:
        found[count] = solver.searched(count, found[count])
    if counts is None and (best := _most_promising(found)):
        beside = [count for count in (best[0] - 1, best[0] + 1) if count > 1 and count not in found]
        for count, judged in solver.simulated(beside).items():
            found[count] = solver.searched(count, judged)
    priced = [solver.priced(found[count][1]) for count in sorted(found)]
    best_cut = min(priced, key=lambda cut: cut.iteration_time_s)
    return SolvedCut(best_cut.token_slices, best_cut.iteration_time_s, tuple(priced))


def places_to_cut(seq_length: int, strategy: Strategy, count: int, granularity: int | None = None) -> CutGrid:
    """Return the places [points] where a sequence may be split: as in the trainer, or fewer.

    Args:
        strategy: whose tensor-parallel ranks may share the tokens of a token slice.
        granularity: tokens that lengths are multiples of; None = as the trainer's own cuts.
    """
    step = granularity or granularity_of(seq_length, count, strategy.granularity)
    times = min(-(-seq_length // (step * MOST_POINTS)), seq_length // (4 * count * step))
    step *= max(times, 1)
    return CutGrid(seq_length, step, step)


def whole_messages(cost_model: CostModel, strategy: Strategy) -> float | TransferCosts:
    """Return the costs of messages between stages with whole sequences, as `OpCosts.transfer`."""
    return cost_model.pipeline_costs(replace(strategy, num_token_slices=1, token_slices=None)).transfer


Judged = tuple[float, TokenSlices]  # makespan with a cut, and the cut


def _most_promising(found: Mapping[int, Judged]) -> list[int]:
    """Numbers of token slices that leave lengths to choose, the best first."""
    return sorted((count for count in found if count > 1), key=lambda count: found[count][0])


@dataclass(eq=False)
class _Solver:
    """Cuts for one strategy; keeps tables of times."""

    cost_model: CostModel
    strategy: Strategy
    granularity: int | None
    memory_limit: float | None
    model_chunk_placement: Placement
    refusal: str = ""
    """Why the last number was refused; empty = none was."""

    def __post_init__(self) -> None:
        self._schedule = None if self.strategy.schedule == OPTIMISED else schedule_named(self.strategy.schedule)
        self._tables = cache(TabulatedCosts.of)
        """Times of a grid, made once; so are the others."""
        self._for_gpipe, self._evaluation = cache(self._best_for_gpipe), cache(self._evaluation_of)

    def sketched_s(self, count: int) -> float | None:
        """About the makespan of the best cut; None if so many token slices do not fit."""
        try:
            return self._for_gpipe(count)[0]
        except PlanError as error:
            self.refusal = f" ({error})"
            return None

    def simulated(self, counts: Sequence[int]) -> dict[int, Judged]:
        """The better of equal lengths and gpipe's best, for each number that the sequence and the schedule allow."""
        found = {}
        for count in counts:
            grid = self._grid(count)
            try:
                cuts = {TokenSlices.uniform(grid.seq_length, count, granularity=grid.granularity)}
                cuts.add(self._for_gpipe(count)[1])
                evaluation = self._evaluation(count)
            except PlanError as error:
                self.refusal = f" ({error})"
                continue
            judged = ((evaluation(cut), cut) for cut in sorted(cuts, key=str))
            found[count] = min(judged, key=itemgetter(0))
        return found

    def searched(self, count: int, simulated: Judged) -> Judged:
        """The best of a search, or `simulated` if that is better."""
        effort = EFFORT if self._schedule else OPTIMISED_EFFORT
        solved = search_cuts(self._grid(count), count, self._evaluation(count), effort)
        return min(simulated, (solved.makespan, solved.cut), key=itemgetter(0))

    def priced(self, cut: TokenSlices) -> PricedCut:
        """With all that an iteration takes."""
        strategy = replace(self.strategy, num_token_slices=len(cut), token_slices=cut.lengths)
        predicted = self.cost_model.predict_time(
            strategy, memory_limit=self.memory_limit, model_chunk_placement=self.model_chunk_placement
        )
        return PricedCut(cut.lengths, predicted.iteration_time_s)

    def _grid(self, count: int) -> CutGrid:
        return places_to_cut(self.cost_model.workload.seq_length, self.strategy, count, self.granularity)

    def _tabulated(self, count: int) -> TabulatedCosts:
        """Times with the dispatcher for so many token slices."""
        grid = self._grid(count)
        even = TokenSlices.uniform(grid.seq_length, count, granularity=grid.granularity)
        cut = replace(self.strategy, num_token_slices=count, token_slices=even.lengths)
        return self._tables(self.cost_model.dispatched(cut), self.strategy, grid)

    def _evaluation_of(self, count: int) -> CutEvaluation:
        shape = pipeline_shape(replace(self.strategy, num_token_slices=count, token_slices=None))
        shape = replace(shape, placement=self.model_chunk_placement)
        transfer = whole_messages(self.cost_model, self.strategy)
        costs = self._tabulated(count)
        if self._schedule is not None:
            return ExtrapolatedSchedule(self._schedule, shape, costs, transfer)
        return self._optimised(shape, costs, transfer)

    def _optimised(self, shape: PipelineShape, costs: TabulatedCosts, transfer: float | TransferCosts) -> CutEvaluation:
        even = TokenSlices((1,) * shape.num_token_slices)
        limit = self.memory_limit or memory_of_1f1b(shape, even)
        # Makespans of found orders are not on a straight line over the micro-batches.
        fewer = replace(shape, num_micro_batches=min(shape.num_micro_batches, OPTIMISED_ROUNDS * shape.num_ranks))
        return OptimisedOrders(fewer, costs, memory_limit=limit, transfer=transfer)

    def _best_for_gpipe(self, count: int) -> Judged:
        """The balanced cut that is best for gpipe, by TeraPipe's formula (arXiv 2102.07988, equation 5).

        All ops of the busiest rank one after the other, and the longest forward and backward once for each other rank.
        """
        grid = self._grid(count)
        strategy = self.strategy
        # A rank with several model chunks passes every micro-batch as often.
        passes, ranks = strategy.num_micro_batches * strategy.num_model_chunks, strategy.pipeline_parallel_size
        costs = self._tabulated(count).busiest_and_others(ranks)

        def makespan(cut: TokenSlices) -> float:
            busiest, others = costs(range(2), *bounds_of(cut)).swapaxes(0, 1)
            longest = others[0].max() + (others[1] + others[2]).max()
            return float(passes * busiest.sum() + (ranks - 1) * longest)

        cuts = dict.fromkeys(grid.balanced(count, attention) for attention in SKETCHED)
        return min(((makespan(cut), cut) for cut in cuts), key=itemgetter(0))
