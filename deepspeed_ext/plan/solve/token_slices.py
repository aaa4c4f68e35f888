"""Token slices, and layers of stages with them, for the schedule that really runs: a search judged by the makespan.

A cut is good if no rank waits; when they do depends on the schedule, on uneven stages, on the memory limit. There is
no formula (TeraPipe's holds for gpipe; equal forward FLOPs leave the backwards uneven, in which attention weighs
twice), so cuts are tried: first those that would be balanced if attention were 0, 10, 20 ... 100 % of the cost, then
tokens are moved between the token slices of the best, many at first, at last as few as the granularity lets.

A language-model head costs as much as several layers. Its rank makes all others wait, in every token slice, unless it
has fewer layers. The search of stages begins with ranks that are as equally loaded as whole layers allow, then moves
single layers between stages and tokens between token slices in turn.

Evaluations keep all that does not depend on the cut, so that one cut costs a replay, and count the simulated ops: that
is the clock of a search, since results must not depend on time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np

from deepspeed_ext.plan.costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, TokenSliceCosts, bounds_of, op_costs
from deepspeed_ext.plan.solve.list_scheduler import Priorities, PriorityRule, list_schedule
from deepspeed_ext.plan.solve.orders import search_rules
from deepspeed_ext.plan.solve.problem import SchedulingProblem, peaks, replay
from deepspeed_ext.plan.terminal import Progress, no_progress, part_of

PANEL = 4
"""Rules that judge a cut: an optimised schedule is as good as the best of them, or a little better."""
RULES_PER_ROUND, OPS_PER_ROUND, FEWEST_RULES = 400, 3e6, 40
"""How many rules are tried when a panel is chosen: by the ops of a pipeline, but no more and no fewer than these."""
LIST_SCHEDULE_PER_REPLAY = 5
"""Cost of making an order, in replays of it."""


class CutEvaluation(ABC):
    """Judges cuts."""

    num_ops: int
    """Ops that were simulated so far."""

    @abstractmethod
    def __call__(self, cut: TokenSlices) -> float:
        """Makespan with a cut; more than any if the memory limit is not kept."""

    def adapt(self, cut: TokenSlices) -> None:
        """Choose the best for this cut, where there is a choice."""
        return


class _Evaluation(CutEvaluation):
    """Makes the problem of one cut from the problem of another; see `solve_token_slices` for the arguments."""

    def __init__(
        self,
        shape: PipelineShape,
        token_slice_costs: TokenSliceCosts,
        *,
        memory_limit: float | None = None,
        transfer: float | TransferCosts = 0.0,
    ) -> None:
        self.num_ops = 0
        self._token_slice_costs = token_slice_costs
        self._equal = TokenSlices((1,) * shape.num_token_slices)
        costs = op_costs(shape, self._equal, token_slice_costs, transfer)
        self._problem = SchedulingProblem.of(shape, costs, memory_limit)

    def problem(self, cut: TokenSlices) -> SchedulingProblem:
        """Return the problem with the times and the memory of a cut."""
        shape, tables = self._problem.shape, self._problem.tables
        shares = np.array(cut.lengths) / cut.seq_length
        return replace(
            self._problem,
            lengths=tuple(shares.tolist()),
            tables=tables._replace(
                times=np.ascontiguousarray(self._token_slice_costs(range(shape.num_stages), *bounds_of(cut))),
                activation=shares / shape.num_model_chunks,
                sending=tables.sending * (shares * shape.num_token_slices),
            ),
        )

    def change_costs(self, token_slice_costs: TokenSliceCosts) -> None:
        """Judge by other costs from now on."""
        self._token_slice_costs = token_slice_costs


class FixedSchedule(_Evaluation):
    """Judges cuts by one schedule with a fixed order."""

    def __init__(
        self, schedule: Schedule, shape: PipelineShape, token_slice_costs: TokenSliceCosts, **more: Any
    ) -> None:
        super().__init__(shape, token_slice_costs, **more)
        problem = self.problem(self._equal)
        self._orders = CompiledOrders.of_schedule(schedule, shape)
        if replay(problem, self._orders) == inf:
            raise PlanError("the schedule deadlocks, whatever the token slices: simulate it to see which ops wait")

    def __call__(self, cut: TokenSlices) -> float:
        """See `CutEvaluation`."""
        problem = self.problem(cut)
        self.num_ops += int(self._orders.lengths.sum())
        over = float(peaks(problem, self._orders).max()) - problem.memory_limit
        makespan = replay(problem, self._orders)
        # Not infinite, so that a search finds its way down to the limit.
        return makespan if over <= 1e-9 else makespan * (100 + over)


class OptimisedOrders(_Evaluation):
    """Judges cuts by the orders that a few good rules give; `adapt` finds other rules."""

    _rules: Sequence[PriorityRule] = ()

    def __call__(self, cut: TokenSlices) -> float:
        """See `CutEvaluation`."""
        problem = self.problem(cut)
        priorities = Priorities(problem)
        if not self._rules:
            self.adapt(cut)
        self.num_ops += problem.num_ops * len(self._rules) * LIST_SCHEDULE_PER_REPLAY
        return min(list_schedule(problem, priorities.of(rule), priorities.patience(rule))[0] for rule in self._rules)

    def adapt(self, cut: TokenSlices) -> None:
        """See `CutEvaluation`."""
        problem = self.problem(cut)
        num_rules = max(min(RULES_PER_ROUND, int(OPS_PER_ROUND / problem.num_ops)), FEWEST_RULES)
        self.num_ops += problem.num_ops * num_rules * LIST_SCHEDULE_PER_REPLAY
        self._rules = search_rules(problem, num_rules, seed=0, known=self._rules)[:PANEL]


def _evaluation(
    schedule: Schedule | None, shape: PipelineShape, token_slice_costs: TokenSliceCosts, **more: Any
) -> FixedSchedule | OptimisedOrders:
    if schedule is None:
        return OptimisedOrders(shape, token_slice_costs, **more)
    return FixedSchedule(schedule, shape, token_slice_costs, **more)


PLAYED_OPS = 25e6
"""Ops that the search simulates with effort 1: about a second of one core."""
FAMILY = tuple(step / 10 for step in range(11))
"""Shares of attention that the first cuts are balanced for."""
ROUNDS = 3
"""Times that rules are adapted to the cut, and the cut to the rules."""


@dataclass(frozen=True)
class SolvedTokenSlices:
    """A cut and its makespan."""

    cut: TokenSlices
    makespan: float
    """With the schedule; of an optimised one, at most this once it is optimised for this cut with about the same
    effort."""


def solve_token_slices(
    shape: PipelineShape,
    seq_length: int,
    token_slice_costs: TokenSliceCosts,
    *,
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
    granularity: int = 1,
    min_length: int = 1,
    transfer: float | TransferCosts = 0.0,
    effort: float = 1.0,
    progress: Progress = no_progress,
) -> SolvedTokenSlices:
    """Find the cut with the shortest step.

    Args:
        schedule: that will run; None for one that `optimise` makes for this cut.
        memory_limit: activations of one micro-batch on one rank that a rank may hold; None for no limit.
        granularity: token slices are multiples of this, as kernels that work in tiles like it.
        min_length: tokens that each token slice has at least, so that kernels stay efficient.
        transfer: as `OpCosts.transfer`, with the bytes of a micro-batch.
        effort: time to take, in about a second of one core.
    """
    grid = CutGrid(seq_length, granularity, min_length)
    grid.check_count(shape.num_token_slices)
    evaluation = _evaluation(schedule, shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)
    rounds = 1 if schedule else ROUNDS
    solved = search_cuts(grid, shape.num_token_slices, evaluation, effort, rounds=rounds, progress=progress)
    if schedule is not None and memory_limit is not None:
        check_memory(schedule, shape, solved.cut, memory_limit)
    return solved


def search_cuts(
    grid: CutGrid,
    num_token_slices: int,
    evaluation: CutEvaluation,
    effort: float,
    *,
    rounds: int = 1,
    progress: Progress = no_progress,
) -> SolvedTokenSlices:
    """Search the cuts of a grid for the one with the shortest step.

    Args:
        effort: time to take, in about a second of one core.
        rounds: times that the evaluation is adapted to the cut.
    """
    if not effort > 0:
        raise PlanError(f"effort {effort} leaves no time to search: give more than 0")
    family = dict.fromkeys(grid.balanced(num_token_slices, attention) for attention in FAMILY)
    makespan, cut = min(((evaluation(cut), cut) for cut in family), key=lambda judged: judged[0])
    for turn in range(rounds):
        if turn:
            evaluation.adapt(cut)
            makespan = evaluation(cut)
        part = part_of(progress, turn / rounds, (turn + 1) / rounds)
        makespan, cut = _moved(grid, makespan, cut, evaluation, int(effort * PLAYED_OPS / rounds), part)
    return SolvedTokenSlices(cut, makespan)


def _moved(
    grid: CutGrid, makespan: float, cut: TokenSlices, evaluation: CutEvaluation, num_ops: int, progress: Progress
) -> tuple[float, TokenSlices]:
    """Move tokens between token slices as long as it helps: fewer and fewer of them. Simulates about `num_ops` ops."""
    last = evaluation.num_ops + num_ops
    step = max(grid.seq_length // (4 * len(cut) * grid.granularity), 1) * grid.granularity
    while evaluation.num_ops < last:
        improved = False
        for source, target in _pairs(len(cut)):
            if evaluation.num_ops >= last:
                break
            progress(1 - (last - evaluation.num_ops) / num_ops)
            lengths = list(cut.lengths)
            lengths[source] -= step
            lengths[target] += step
            if min(lengths) < grid.min_length:
                continue
            changed = TokenSlices(tuple(lengths))
            judged = evaluation(changed)
            if judged < makespan:
                makespan, cut, improved = judged, changed, True
        if not improved:
            if step == grid.granularity:
                break
            step = max(step // (2 * grid.granularity), 1) * grid.granularity
    return makespan, cut


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    """Ordered pairs, neighbours first: their exchange moves one boundary only."""
    for distance in range(1, count):
        for left in range(count - distance):
            yield left, left + distance
            yield left + distance, left


def check_memory(schedule: Schedule, shape: PipelineShape, cut: TokenSlices, memory_limit: float) -> None:
    """Check that a schedule keeps the memory limit, in activations of one micro-batch, with a cut."""
    peak = max(CompiledOrders.of_schedule(schedule, shape).peak_activation(cut.lengths))
    if peak > memory_limit + 1e-9:
        raise PlanError(
            f"memory limit {memory_limit}: no cut was found with which this schedule keeps it, the best holds "
            f"{peak:.3f} activations of a micro-batch; give a higher limit, more token slices, or an optimised schedule"
        )


CostsOfLayers = Callable[[Sequence[int]], TokenSliceCosts]
"""Costs of stages with so many layers each: embedding and head included, wherever they are."""

STAGE_ROUNDS = 2
MOST_SOURCES = 4
"""Stages that layers are taken from, and stages that get them, in one try: the heaviest and the lightest."""


@dataclass(frozen=True)
class SolvedStages(SolvedTokenSlices):
    """Token slices and stages, and their makespan."""

    partition: StagePartition


def solve_stages(
    shape: PipelineShape,
    num_layers: int,
    seq_length: int,
    costs_of_layers: CostsOfLayers,
    *,
    schedule: Schedule | None = None,
    memory_limit: float | None = None,
    granularity: int = 1,
    min_length: int = 1,
    transfer: float | TransferCosts = 0.0,
    effort: float = 1.0,
    progress: Progress = no_progress,
) -> SolvedStages:
    """Find layers per stage and token slices with a short step.

    Args:
        memory_limit: as the others, as for `solve_token_slices`; activations count as if stages were even.
        effort: time to take, in about three seconds of one core.
    """
    grid = CutGrid(seq_length, granularity, min_length)
    grid.check_count(shape.num_token_slices)
    even = StagePartition.uniform(num_layers, shape.num_stages)
    layers = _level([len(even.layers(stage)) for stage in range(shape.num_stages)], shape, costs_of_layers, seq_length)
    token_slice_costs = costs_of_layers(layers)
    evaluation = _evaluation(schedule, shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)

    def searched(turn: int) -> SolvedTokenSlices:
        part = part_of(progress, turn / (STAGE_ROUNDS + 1), (turn + 1) / (STAGE_ROUNDS + 1))
        return search_cuts(grid, shape.num_token_slices, evaluation, effort, progress=part)

    solved = searched(0)
    for turn in range(1, STAGE_ROUNDS + 1):
        before = layers
        layers = _moved_layers(layers, shape, costs_of_layers, solved.cut, evaluation)
        evaluation.change_costs(costs_of_layers(layers))
        if layers == before:
            break
        evaluation.adapt(solved.cut)
        solved = searched(turn)
    if schedule is not None and memory_limit is not None:
        check_memory(schedule, shape, solved.cut, memory_limit)
    return SolvedStages(solved.cut, solved.makespan, StagePartition(tuple(accumulate(layers, initial=0))))


def _loads(layers: Sequence[int], shape: PipelineShape, costs_of_layers: CostsOfLayers, seq_length: int) -> list[float]:
    times = costs_of_layers(layers)(range(shape.num_stages), np.array([0]), np.array([seq_length]))
    return [float(time) for time in times.sum(axis=(0, 2))]


def _moved_layer(layers: Sequence[int], source: int, target: int) -> list[int]:
    return [count - (stage == source) + (stage == target) for stage, count in enumerate(layers)]


def _level(layers: list[int], shape: PipelineShape, costs_of_layers: CostsOfLayers, seq_length: int) -> list[int]:
    """Move layers from the rank with the most work to the one with the least, while that makes the most less."""

    def by_rank(loads: Sequence[float]) -> list[float]:
        return [sum(loads[stage] for stage in shape.stages_of(rank)) for rank in range(shape.num_ranks)]

    loads = _loads(layers, shape, costs_of_layers, seq_length)
    while True:
        work = by_rank(loads)
        heavy, light = work.index(max(work)), work.index(min(work))
        source = max(shape.stages_of(heavy), key=layers.__getitem__)
        target = min(shape.stages_of(light), key=layers.__getitem__)
        if layers[source] == 1 or heavy == light:
            return layers
        changed = _moved_layer(layers, source, target)
        loads = _loads(changed, shape, costs_of_layers, seq_length)
        if sorted(by_rank(loads), reverse=True) >= sorted(work, reverse=True):
            return layers
        layers = changed


def _moved_layers(
    layers: list[int],
    shape: PipelineShape,
    costs_of_layers: CostsOfLayers,
    cut: TokenSlices,
    evaluation: FixedSchedule | OptimisedOrders,
) -> list[int]:
    """Move single layers between stages while the step gets shorter."""
    evaluation.change_costs(costs_of_layers(layers))
    makespan = evaluation(cut)
    improved = True
    while improved:
        improved = False
        loads = _loads(layers, shape, costs_of_layers, cut.seq_length)
        by_load = sorted(range(shape.num_stages), key=loads.__getitem__)
        for source in reversed(by_load[-MOST_SOURCES:]):
            for target in by_load[:MOST_SOURCES]:
                if source == target or layers[source] == 1:
                    continue
                changed = _moved_layer(layers, source, target)
                evaluation.change_costs(costs_of_layers(changed))
                judged = evaluation(cut)
                if judged < makespan:
                    makespan, layers, improved = judged, changed, True
    return layers
