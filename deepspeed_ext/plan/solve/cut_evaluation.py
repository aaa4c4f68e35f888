"""How long a step takes with a cut: what the solvers of token slices and of stages compare by.

Both evaluations keep what does not depend on the cut (the order of a fixed schedule, the channels), so that one cut
costs a replay, and count the simulated ops: that is the solvers' clock, since results must not depend on time.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

import numpy as np

from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.optimise.list_scheduler import list_schedule
from deepspeed_ext.plan.optimise.priority_rules import Priorities, PriorityRule
from deepspeed_ext.plan.optimise.problem import SchedulingProblem
from deepspeed_ext.plan.optimise.replay import NumberedOrders, peaks, replay
from deepspeed_ext.plan.optimise.search import search_rules
from deepspeed_ext.plan.schedules import Schedule, rank_orders
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts, bounds_of, op_costs

PANEL = 4
"""Rules that judge a cut: an optimised schedule is as good as the best of them, or a little better."""
RULES_PER_ROUND, OPS_PER_ROUND, FEWEST_RULES = 400, 3e6, 40
"""How many rules are tried when a panel is chosen: by the ops of a pipeline, but no more and no fewer than these."""
LIST_SCHEDULE_PER_REPLAY = 5
"""Cost of making an order, in replays of it."""


class CutEvaluation(Protocol):
    """Judges cuts."""

    num_ops: int
    """Ops that were simulated so far."""

    def __call__(self, cut: TokenSlices) -> float:
        """Makespan with a cut; more than any if the memory limit is not kept."""
        ...

    def change_costs(self, token_slice_costs: TokenSliceCosts) -> None:
        """Judge by other costs from now on."""
        ...

    def adapt(self, cut: TokenSlices) -> None:
        """Choose what is best for this cut, where there is a choice."""
        ...


class _Cuts:
    """Makes the problem of one cut from that of another."""

    def __init__(
        self,
        shape: PipelineShape,
        token_slice_costs: TokenSliceCosts,
        memory_limit: float | None,
        transfer: float | TransferCosts,
    ) -> None:
        self.token_slice_costs = token_slice_costs
        even = TokenSlices((1,) * shape.num_token_slices)
        self._even = SchedulingProblem.of(shape, op_costs(shape, even, token_slice_costs, transfer), memory_limit)

    def problem(self, cut: TokenSlices) -> SchedulingProblem:
        """With the times and the memory of a cut."""
        shape, tables = self._even.shape, self._even.tables
        shares = np.array(cut.lengths) / cut.seq_length
        return replace(
            self._even,
            lengths=tuple(shares.tolist()),
            tables=tables._replace(
                times=np.ascontiguousarray(self.token_slice_costs(range(shape.num_stages), *bounds_of(cut))),
                activation=shares / shape.num_model_chunks,
                sending=tables.sending * (shares * shape.num_token_slices),
            ),
        )


class FixedSchedule:
    """Judges cuts by one schedule, whose order does not depend on them."""

    def __init__(
        self,
        schedule: Schedule,
        shape: PipelineShape,
        token_slice_costs: TokenSliceCosts,
        *,
        memory_limit: float | None = None,
        transfer: float | TransferCosts = 0.0,
    ) -> None:
        """See `solve_token_slices` for the arguments.

        Raises:
            PlanError: if the schedule deadlocks, or has no such shape.
        """
        self.num_ops = 0
        self._cuts = _Cuts(shape, token_slice_costs, memory_limit, transfer)
        even = TokenSlices((1,) * shape.num_token_slices)
        problem = self._cuts.problem(even)
        self._orders = NumberedOrders.of(problem.numbered(rank_orders(schedule, shape)))
        if replay(problem, self._orders) == inf:
            raise PlanError("the schedule deadlocks, whatever the token slices: simulate it to see which ops wait")

    def __call__(self, cut: TokenSlices) -> float:
        """See `CutEvaluation`."""
        problem = self._cuts.problem(cut)
        self.num_ops += int(self._orders.lengths.sum())
        over = float(peaks(problem, self._orders).max()) - problem.memory_limit
        makespan = replay(problem, self._orders)
        # Not infinite, so that a search finds its way down to the limit.
        return makespan if over <= 1e-9 else makespan * (100 + over)

    def change_costs(self, token_slice_costs: TokenSliceCosts) -> None:
        """See `CutEvaluation`."""
        self._cuts.token_slice_costs = token_slice_costs

    def adapt(self, cut: TokenSlices) -> None:
        """There is one order only."""


class OptimisedOrders:
    """Judges cuts by the orders that a few good rules give; `adapt` finds other rules."""

    def __init__(
        self,
        shape: PipelineShape,
        token_slice_costs: TokenSliceCosts,
        *,
        memory_limit: float | None = None,
        transfer: float | TransferCosts = 0.0,
        seed: int = 0,
    ) -> None:
        """See `solve_token_slices` for the arguments."""
        self.num_ops = 0
        self._cuts = _Cuts(shape, token_slice_costs, memory_limit, transfer)
        self._rules: Sequence[PriorityRule] = ()
        self._seed = seed

    def __call__(self, cut: TokenSlices) -> float:
        """See `CutEvaluation`."""
        problem = self._cuts.problem(cut)
        priorities = Priorities(problem)
        if not self._rules:
            self.adapt(cut)
        self.num_ops += problem.num_ops * len(self._rules) * LIST_SCHEDULE_PER_REPLAY
        return min(list_schedule(problem, priorities.of(rule), priorities.patience(rule))[0] for rule in self._rules)

    def change_costs(self, token_slice_costs: TokenSliceCosts) -> None:
        """See `CutEvaluation`."""
        self._cuts.token_slice_costs = token_slice_costs

    def adapt(self, cut: TokenSlices) -> None:
        """See `CutEvaluation`."""
        problem = self._cuts.problem(cut)
        num_rules = max(min(RULES_PER_ROUND, int(OPS_PER_ROUND / problem.num_ops)), FEWEST_RULES)
        self.num_ops += problem.num_ops * num_rules * LIST_SCHEDULE_PER_REPLAY
        self._rules = search_rules(problem, num_rules, self._seed, self._rules)[:PANEL]


def evaluation_of(
    schedule: Schedule | None,
    shape: PipelineShape,
    token_slice_costs: TokenSliceCosts,
    *,
    memory_limit: float | None,
    transfer: float | TransferCosts,
) -> CutEvaluation:
    """Return what cuts for a schedule are judged by.

    Args:
        schedule: that will run; None for the one that `optimise` makes.
        memory_limit: activations of one micro-batch that a rank may hold; None for no limit.

    Raises:
        PlanError: if the schedule deadlocks, or has no such shape.
    """
    if schedule is None:
        return OptimisedOrders(shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)
    return FixedSchedule(schedule, shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)
