r"""Finds op orders that are better than the fixed schedules, for any costs, and under a memory limit.

On every stage the forwards have one order, and the input gradients and the weight gradients share another:
micro-batches first to last (ADR 0005), token slices first to last forward and last to first backward. A rank only
decides from which of its queues the next op comes, 3 queues for each of its stages:

    rank 1, stages 1 and 6     F  of stage 1   F0.2 F0.3 F1.0 ...    \
                               BI of stage 1   BI0.3 BI0.2 ...        |   which of the heads
                               BW of stage 1   BW0.3 BW0.2 ...        |   is the next op?
                               F, BI, BW of stage 6                  /

1.  `list_schedule` decides by priorities: the most urgent op that can start now. It reserves memory for the oldest
    micro-batch, so it never breaks the memory limit and never deadlocks, for any priorities.
2.  `PriorityRule` makes all priorities from seven numbers: how closely token slices follow each other, when backwards
    become more urgent than forwards, how long weight gradients wait for a gap. `search_rules` draws thousands of rules,
    keeps the best, and varies these (an evolution strategy); then single ops of the best become more or less urgent,
    as long as that helps. Each try costs one list schedule, some tenths of a microsecond for each op.
3.  `anneal` takes the best orders, or a fixed schedule's if they are better, and moves single ops that are on
    the critical path. Rules describe the steady state; moves also improve the warmup and the cooldown.
4.  `merged` joins neighbouring input and weight gradients into whole backwards, where it costs no time.
5.  `bound.lower_bound` is a makespan that no order can beat.

The fixed schedules that keep the limit compete, so the result is never worse than the best of them. It depends only on
the arguments, not on the clock. Copies to the host are not part of the problem; they are planned for the orders that
are found (`programs.host_copies`). `problem` stores everything as arrays and replays orders as `simulate` does. Other
methods: zero-bubble's automatic scheduler (arXiv 2401.10241 section 3.1), which is a greedy pass without token slices;
integer programs (OptPipe, arXiv 2510.05186), which are exact for tens of ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, check_num_ops, parts
from deepspeed_ext.plan.schedules import SCHEDULES, Schedule, fixed, rank_orders
from deepspeed_ext.plan.simulate.arrays import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Numbers
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.solve.bound import lower_bound
from deepspeed_ext.plan.solve.list_scheduler import Priorities, PriorityRule, anneal, list_schedule
from deepspeed_ext.plan.solve.problem import SchedulingProblem, keeps_limit, replay
from deepspeed_ext.plan.terminal import Progress, no_progress, part_of

__all__ = ["OptimisedSchedule", "optimise"]

SCHEDULED_OPS, MOVED_OPS = 12e6, 100e6
"""Ops that list schedules, and replays of moves, go through with effort 1: a few seconds of one core each."""
BY_RULES = 0.5
"""Share of the list schedules that are made from rules; the others have priorities of some ops changed."""
DRAWN = 0.4
"""Share of the rules that are drawn anywhere; the others are near good ones."""
TILL_RULES, TILL_NUDGES = 0.4, 0.85
"""Shares of the time of a search at which its rules, and the priorities near them, are done, about."""
NUM_ELITE = 8
FEWEST_SCHEDULES, FEWEST_MOVES = 60, 200
MERGE_SLACK = 1e-12
"""Rounding of makespans that merging backwards must keep, relative."""
MERGED_OPS, FEWEST_REPLAYS = 20e6, 100
"""Ops that all tries of merging replay together, about a second of one core; untried backwards stay in two parts."""


@dataclass(frozen=True)
class OptimisedSchedule:
    """Op orders with their figures."""

    shape: PipelineShape
    orders: tuple[tuple[Op, ...], ...]
    makespan: float
    """Makespan with the costs they were optimised for."""
    bubble_ratio: float
    """Idle time over ranks x makespan."""
    problem: SchedulingProblem = field(repr=False, compare=False)
    peak_activation: tuple[float, ...]
    """Per rank its peak, in activations of one micro-batch."""

    @cached_property
    def lower_bound(self) -> float:
        """Makespan that no order can beat under the memory limit; see `bound`."""
        return lower_bound(self.problem)

    @property
    def schedule(self) -> Schedule:
        """The orders as a schedule, only for their shape."""
        return fixed(self.orders)


MOST_SEARCHED_OPS = 2**18
"""Ops on all ranks for which an order is searched at most: minutes."""


def optimise(
    shape: PipelineShape,
    costs: OpCosts,
    *,
    memory_limit: float | None = None,
    lengths: Sequence[float] | None = None,
    effort: float = 1.0,
    seed: int = 0,
    progress: Progress = no_progress,
) -> OptimisedSchedule:
    """Find op orders with a short makespan, never worse than a fixed schedule that keeps the limit.

    They do not deadlock and keep the order of micro-batches that all schedules have (ADR 0005).

    Args:
        costs: of ops and transfers. Without `weight_gradient` all backwards stay whole.
        memory_limit: activations of one micro-batch on one rank that a rank may hold, 1 or more; None for no limit.
            A token slice of a stage counts its share of the tokens over the model chunks, from F to BW or B.
        lengths: of the token slices, for the memory; None for equal ones.
        effort: time to take, in some seconds of one core.
    """
    check_num_ops(shape, MOST_SEARCHED_OPS)
    if not effort > 0:
        raise PlanError(f"effort {effort} leaves no time to search: give more than 0")
    problem = SchedulingProblem.of(shape, costs, memory_limit, lengths)
    _, start = min([*_fixed_schedules(problem), _searched(problem, effort, seed, progress)], key=itemgetter(0))
    num_moves = max(int(effort * MOVED_OPS / problem.num_ops), FEWEST_MOVES)
    _, orders = anneal(problem, start, num_moves, seed)
    orders = merged(problem, orders)
    simulated = orders.simulate(costs)
    return OptimisedSchedule(
        shape,
        tuple(map(tuple, orders.orders)),
        simulated.makespan,
        simulated.bubble_ratio,
        problem,
        orders.peak_activation(problem.lengths),
    )


_Candidate = tuple[float, CompiledOrders]
"""Orders after their makespan."""


def _fixed_schedules(problem: SchedulingProblem) -> list[_Candidate]:
    """Fixed schedules that exist for this shape and these costs, and keep the memory limit."""
    candidates = []
    for schedule in SCHEDULES.values():
        try:
            orders = rank_orders(schedule, problem.shape)
        except PlanError:  # it has no such model chunks
            continue
        if problem.is_split:
            # The input gradient is there earlier, so no order gets longer.
            orders = [[part for op in order for part in parts(op)] for order in orders]
        elif any(op.kind is OpKind.WEIGHT_GRADIENT for order in orders for op in order):
            continue
        numbered = CompiledOrders.of(orders, problem.shape)
        if keeps_limit(problem, numbered):
            candidates.append((replay(problem, numbered), numbered))
    return candidates


def _searched(problem: SchedulingProblem, effort: float, seed: int, progress: Progress) -> _Candidate:
    """The best orders that priorities give."""
    num_schedules = max(int(effort * SCHEDULED_OPS / problem.num_ops), FEWEST_SCHEDULES)
    num_rules = int(BY_RULES * num_schedules)
    rule = search_rules(problem, num_rules, seed, progress=part_of(progress, 0.0, TILL_RULES))[0]
    makespan, rows = _nudged(problem, rule, num_schedules - num_rules, seed, part_of(progress, TILL_RULES, TILL_NUDGES))
    orders = CompiledOrders.of_numbers(list(rows), problem.shape)
    return makespan, orders if problem.is_split else merged(problem, orders)


def _nudged(
    problem: SchedulingProblem, rule: PriorityRule, num_nudges: int, seed: int, progress: Progress
) -> tuple[float, Numbers]:
    """Climb from the priorities of a rule: change one kind's on a stage, in a stretch of time, or both.

    Equally good priorities are taken too, so that the climb crosses plateaus.
    """
    random = np.random.default_rng(seed)
    maker = Priorities(problem)
    priorities, patience = maker.of(rule), maker.patience(rule)
    makespan, rows = list_schedule(problem, priorities, patience)
    for number in range(num_nudges):
        progress(number / num_nudges)
        step = random.normal() * 10 ** random.uniform(-3, -0.5) * maker.period
        kind, stage = random.integers(3), random.integers(problem.shape.num_stages)
        first = random.integers(problem.num_units)
        stretch = slice(first, first + random.integers(1, problem.shape.num_token_slices + 1))
        changes = (kind, stage), (kind, stage, stretch), (kind, slice(None), stretch)
        nudged = priorities.copy()
        nudged[changes[random.integers(3)]] += step
        length, changed = list_schedule(problem, nudged, patience)
        if length <= makespan:
            makespan, rows, priorities = length, changed, nudged
    return makespan, rows


def search_rules(
    problem: SchedulingProblem,
    num_rules: int,
    seed: int,
    known: Sequence[PriorityRule] = (),
    progress: Progress = no_progress,
) -> list[PriorityRule]:
    """Good rules for a problem, best first."""
    random = np.random.default_rng(seed)
    priorities = Priorities(problem)

    def makespan(rule: PriorityRule) -> float:
        return list_schedule(problem, priorities.of(rule), priorities.patience(rule))[0]

    drawn = [*known, *(PriorityRule.drawn(random) for _ in range(int(DRAWN * num_rules)))]
    elite = sorted(((makespan(rule), number, rule) for number, rule in enumerate(drawn)))[:NUM_ELITE]
    for number in range(len(drawn), num_rules):
        progress(number / num_rules)
        rule = elite[random.integers(len(elite))][2].varied(random)
        length = makespan(rule)
        # Rules of one makespan most often give one order, which needs to be there but once.
        if length < elite[-1][0] and all(abs(length - other) > 1e-12 * other for other, *_ in elite):
            elite = sorted([*elite[: NUM_ELITE - 1], (length, number, rule)])
    return [rule for *_, rule in elite]


def merged(problem: SchedulingProblem, orders: CompiledOrders) -> CompiledOrders:
    """Return the orders with input and weight gradients joined into whole backwards, as many as keep the makespan.

    A whole backward keeps fewer tensors alive and starts fewer kernels, but gives its input gradient only at its end.
    Neighbours are tried by the block: all of a rank at once, then either half of a block that would cost time.
    """
    per_kind = problem.shape.num_stages * problem.num_units
    rows = orders.numbers()
    pairs = [_pairs(row, per_kind) for row in rows]
    if not problem.is_split:
        joined = [_joined(row, positions, per_kind) for row, positions in zip(rows, pairs, strict=True)]
        return CompiledOrders.of_numbers(joined, problem.shape)
    longest = replay(problem, orders) * (1 + MERGE_SLACK)
    replays_left = max(int(MERGED_OPS / problem.num_ops), FEWEST_REPLAYS)
    for rank, positions in enumerate(pairs):
        accepted = np.zeros(0, np.int64)
        blocks = [positions]
        while blocks and replays_left > 0:
            block = blocks.pop()
            if not len(block):
                continue
            replays_left -= 1
            candidate = np.concatenate([accepted, block])
            trial = [*rows[:rank], _joined(rows[rank], candidate, per_kind), *rows[rank + 1 :]]
            if replay(problem, CompiledOrders.of_numbers(trial, problem.shape)) <= longest:
                accepted = candidate
            elif len(block) > 1:
                blocks += [block[len(block) // 2 :], block[: len(block) // 2]]
        rows[rank] = _joined(rows[rank], accepted, per_kind)
    return CompiledOrders.of_numbers(rows, problem.shape)


def _pairs(row: Numbers, per_kind: int) -> Numbers:
    """Positions of input gradients that are followed by their weight gradient."""
    kind, place = row // per_kind, row % per_kind
    next_to = (kind[:-1] == INPUT_GRADIENT) & (kind[1:] == WEIGHT_GRADIENT) & (place[:-1] == place[1:])
    return np.flatnonzero(next_to)


def _joined(row: Numbers, positions: Numbers, per_kind: int) -> Numbers:
    """A row with whole backwards at these positions."""
    joined = row.copy()
    joined[positions] += (BACKWARD - INPUT_GRADIENT) * per_kind
    return np.delete(joined, positions + 1)
