"""What host copies wait for, and which ops wait for them, read off a timeline.

    rank       | [0F0.0]*[0F0.1]    other stages    [0B0.1]*[0B0.0]
    to host             '[ 0.0 ]                       |
    from host                              [ 0.1 ][ 0.0 ]*

A copy to the host waited for its forward, a copy back for the op behind which it was posted; both for the one before
them in their direction. An op waited for the copies back that it reads, and behind a drop for the copy to the host.
A timeline does not say where copies were posted and which op read them: the last op that had ended counts, and the
first backward that may read it and began behind its end. So what it says is never earlier than what was.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_ext.plan.dependencies import result
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.copy_lanes import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.timeline import Span, Timeline


class CopyRun(NamedTuple):
    """One way of a host copy."""

    copy: TimedCopy
    is_fetch: bool
    """Whether it is the way back."""
    start: float
    end: float


class Waited(NamedTuple):
    """What a copy waited for; None for what there is not."""

    op: Span | None
    """The op behind which it was posted."""
    before: CopyRun | None
    """The copy before it in its direction."""
    offload: CopyRun | None
    """Of a copy back: the copy to the host, if it had ended."""


@dataclass(frozen=True, slots=True)
class CopyWaits:
    """Waits of a timeline that are due to host copies."""

    of_copies: Mapping[CopyRun, Waited]
    """What each copy waited for."""
    of_ops: Mapping[Op, Sequence[CopyRun]]
    """The copies that an op waited for."""


def copy_waits(timeline: Timeline) -> CopyWaits:
    """Return the waits of a timeline that are due to host copies."""
    of_copies: dict[CopyRun, Waited] = {}
    of_ops: dict[Op, list[CopyRun]] = defaultdict(list)
    by_rank: dict[int, list[TimedCopy]] = defaultdict(list)
    for copy in timeline.host_copies:
        by_rank[timeline.shape.rank_of(copy.stage)].append(copy)
    for rank, copies in by_rank.items():
        _Rank(timeline.spans[rank]).add(copies, of_copies, of_ops)
    return CopyWaits(of_copies, of_ops)


class _Rank:
    """The ops of one rank, by their places."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts, self._ends = [span.start for span in spans], [span.end for span in spans]
        self._forwards: dict[tuple[int, int, int], int] = {}
        self._turns: dict[tuple[int, int], list[int]] = defaultdict(list)
        for place, (op, _, _) in enumerate(spans):
            if op.kind is OpKind.FORWARD:
                self._forwards[op.stage, op.micro_batch, op.token_slice] = place
            elif result(op).kind is OpKind.INPUT_GRADIENT:
                self._turns[op.stage, op.micro_batch].append(place)

    def add(
        self, copies: Sequence[TimedCopy], of_copies: dict[CopyRun, Waited], of_ops: dict[Op, list[CopyRun]]
    ) -> None:
        """Add the waits of the rank."""
        known = [copy for copy in copies if copy[1:4] in self._forwards]
        before: CopyRun | None = None
        offloads: dict[TimedCopy, CopyRun] = {}
        for copy in sorted(known, key=lambda each: (each.offload_start, self._forwards[each[1:4]])):
            place = self._forwards[copy[1:4]]
            run = offloads[copy] = CopyRun(copy, False, copy.offload_start, copy.offload_end)
            of_copies[run] = Waited(self._spans[place], before, None)
            behind_drop = max(bisect_left(self._starts, copy.dropped), place + 1)
            if behind_drop < len(self._spans):
                of_ops[self._spans[behind_drop].op].append(run)
            before = run
        before = None
        for copy in sorted(known, key=lambda each: (each.fetch_start, self._reader(each))):
            reader = self._reader(copy)
            posted = min(bisect_right(self._ends, copy.fetch_start), reader) - 1
            run = CopyRun(copy, True, copy.fetch_start, copy.fetch_end)
            # Both may be posted at one place, and then nothing makes the way back wait.
            there = offloads[copy] if offloads[copy].end <= copy.fetch_start else None
            of_copies[run] = Waited(self._spans[posted] if posted >= 0 else None, before, there)
            if reader < len(self._spans):
                of_ops[self._spans[reader].op].append(run)
            before = run

    def _reader(self, copy: TimedCopy) -> int:
        """Place of the first backward that reads what was copied; behind all ops if there is none."""
        may_read = [
            place
            for place in self._turns[copy.stage, copy.micro_batch]
            if self._spans[place].op.token_slice >= copy.token_slice
            and (copy.content is Content.KEYS_AND_VALUES or self._spans[place].op.token_slice == copy.token_slice)
        ]
        behind = [place for place in may_read if self._starts[place] >= copy.fetch_end]
        return min(behind or may_read[-1:], default=len(self._spans))
