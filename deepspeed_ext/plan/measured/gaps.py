"""The time between ops of a measured timeline, by what it was spent on.

    rank 0 | [F0.0 ......]
    rank 1 |      |       |~~ transfer ~~[F0.0 ......]|  |[F0.1]
           |-- dependency |                           `--'
                                                      host overhead: all was there

The clocks of ranks start at a barrier, so a gap that seems to end before its cause counts as none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.plan.dependencies import prerequisites, result
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Gap:
    """The time in front of an op on its rank."""

    dependency: float
    """Time in which an input was still being computed on another rank."""
    beyond: float
    """The rest, until the op began: its input was on the way, or the host had other things to do."""
    waited: bool
    """Whether an input was computed after the op before had ended."""
    reason: Op | None
    """The op of another rank that computed it, if so."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """On what a rank spent the time of a step; the parts add up to the makespan."""

    busy: float
    """In ops."""
    dependency: float
    """Waiting for ops of other ranks, at the start and the end of the step too."""
    transfer: float
    """Waiting for results that other ranks had computed."""
    host_overhead: float
    """Between ops, with all inputs there."""


def gaps(timeline: Timeline) -> list[list[Gap]]:
    """Return the gap in front of each op, per rank."""
    ended = {result(span.op): span for row in timeline.spans for span in row}
    found = []
    for row in timeline.spans:
        of_rank: list[Gap] = []
        free = timeline.start
        for op, start, end in row:
            needed = [ended[each] for each in prerequisites(op, timeline.shape) if each in ended]
            latest = max(needed, key=lambda span: span.end, default=None)
            if latest is not None and latest.end > free:
                there = min(latest.end, max(start, free))
                of_rank.append(Gap(there - free, max(start - there, 0.0), True, latest.op))
            else:
                of_rank.append(Gap(0.0, max(start - free, 0.0), False, None))
            free = max(end, free)
        found.append(of_rank)
    return found


def rank_times(timeline: Timeline, of_ranks: Sequence[Sequence[Gap]]) -> list[RankTime]:
    """Return the times of each rank, its gaps added up.

    Args:
        of_ranks: gaps per rank, as `gaps` returns them.
    """
    return [
        RankTime(
            busy,
            sum(gap.dependency for gap in row) + timeline.end - (spans[-1].end if spans else timeline.start),
            sum(gap.beyond for gap in row if gap.waited),
            sum(gap.beyond for gap in row if not gap.waited),
        )
        for busy, spans, row in zip(timeline.busy, timeline.spans, of_ranks, strict=True)
    ]
