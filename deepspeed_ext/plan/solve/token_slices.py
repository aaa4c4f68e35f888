"""Token slices for the schedule that really runs: a search over cuts, judged by the simulated makespan.

A cut is good if no rank waits; when they do depends on the schedule, on uneven stages, on the memory limit. There is
no formula (TeraPipe's holds for gpipe; equal forward FLOPs leave the backwards uneven, in which attention weighs
twice), so cuts are tried: first those that would be balanced if attention were 0, 10, 20 ... 100 % of the cost, then
tokens are moved between the token slices of the best, many at first, at last as few as the granularity lets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cut_evaluation import CutEvaluation, evaluation_of
from deepspeed_ext.plan.solve.cut_grid import CutGrid
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts
from deepspeed_ext.plan.text.progress_line import Progress, unseen

PLAYED_OPS = 25e6
"""Ops that the search simulates with effort 1: about a second of one core."""
FAMILY = tuple(step / 10 for step in range(11))
"""Shares of attention that the first cuts are balanced for."""
ROUNDS = 3
"""Times that rules are adapted to the cut, and the cut to the rules."""


@dataclass(frozen=True)
class SolvedTokenSlices:
    """A cut and what it was judged by."""

    cut: TokenSlices
    makespan: float
    """With the schedule; of an optimised one, what it has at most once it is optimised for this cut with about the same
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
    progress: Progress = unseen,
) -> SolvedTokenSlices:
    """Find the cut with the shortest step.

    The result depends on the arguments alone, not on the clock.

    Args:
        shape: of the pipeline, with the number of token slices wanted.
        token_slice_costs: times of token slices on each stage.
        schedule: that will run; None for one that `optimise` makes for this cut.
        memory_limit: activations of one micro-batch on one rank that a rank may hold; None for no limit.
        granularity: token slices are multiples of this, as kernels that work in tiles like it.
        min_length: tokens that each token slice has at least, so that kernels stay efficient.
        transfer: as `OpCosts.transfer`, with the bytes of a micro-batch.
        effort: time to take, in about a second of one core.
        progress: is told how much of the search is done, at most.

    Raises:
        PlanError: if so many token slices do not fit, the schedule deadlocks, or no cut keeps the memory limit.
    """
    grid = CutGrid(seq_length, granularity, min_length)
    grid.check_count(shape.num_token_slices)
    evaluation = evaluation_of(schedule, shape, token_slice_costs, memory_limit=memory_limit, transfer=transfer)
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
    progress: Progress = unseen,
) -> SolvedTokenSlices:
    """Search the cuts of a grid for the one with the shortest step.

    Args:
        grid: where token slices may begin and end.
        effort: time to take, in about a second of one core.
        rounds: times that the evaluation is adapted to the cut.
        progress: is told how much of the search is done, at most.
    """
    if not effort > 0:
        raise PlanError(f"effort {effort} leaves no time to search: give more than 0")
    family = dict.fromkeys(grid.balanced(num_token_slices, attention) for attention in FAMILY)
    makespan, cut = min(((evaluation(cut), cut) for cut in family), key=lambda judged: judged[0])
    for turn in range(rounds):
        if turn:
            evaluation.adapt(cut)
            makespan = evaluation(cut)

        def of_all(share: float, turn: int = turn) -> None:
            progress((turn + share) / rounds)

        makespan, cut = _moved(grid, makespan, cut, evaluation, int(effort * PLAYED_OPS / rounds), of_all)
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
            if not grid.holds(lengths):
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
    """See that a schedule keeps the memory limit with a cut.

    Args:
        cut: lengths of the token slices.
        memory_limit: activations of one micro-batch that a rank may hold.

    Raises:
        PlanError: if it does not.
    """
    peak = max(CompiledOrders.of_schedule(schedule, shape).peak_activation(cut.lengths))
    if peak > memory_limit + 1e-9:
        raise PlanError(
            f"memory limit {memory_limit}: no cut was found with which this schedule keeps it, the best holds "
            f"{peak:.3f} activations of a micro-batch; give a higher limit, more token slices, or an optimised schedule"
        )
