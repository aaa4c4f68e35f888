"""Host copies in numbers: what happens to which copy behind which op, as arrays for the fast simulator."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from deepspeed_ext.plan.programs.copy_lanes import HostCopyPlan, TimedCopy
from deepspeed_ext.plan.simulate.loop import DROPPED, FETCHED, NOTHING, OFFLOADED

if TYPE_CHECKING:
    from deepspeed_ext.plan.simulate.wiring import Numbers


@dataclass(frozen=True, eq=False, slots=True)
class CopyEvents:
    """Arrays by the names that `loop.simulate_ops` has for them. Copies are numbered rank by rank."""

    posts: "Numbers"
    """[N + 1] where those events begin that have a place behind op n."""
    posted: "Numbers"
    """[events] number of a copy, times 3, plus what happens to it."""
    copying: "Numbers"
    """[2 * C] times of copies to the host, then from it."""
    back: "Numbers"
    """[N] the copy that op n waits for."""

    @classmethod
    def of(cls, plan: HostCopyPlan | None, bounds: "Numbers") -> "CopyEvents":
        """Number the copies of a plan.

        Args:
            plan: copies of all ranks; None for nothing.
            bounds: [R + 1] where the ops of each rank begin and end.
        """
        import numpy as np

        num_ops = int(bounds[-1])
        back = np.full(num_ops, NOTHING, np.int32)
        sizes: list[float] = []
        # By op, then what happens first, then the order in which copies are posted.
        events: list[tuple[int, int, str, int]] = []
        for (first, _), copies in zip(pairwise(bounds.tolist()), () if plan is None else plan.ranks, strict=False):
            for posted, copy in enumerate(copies, start=len(sizes)):
                sizes.append(copy.size)
                events.append((first + copy.offload - 1, OFFLOADED, copy.content, posted))
                events.append((first + copy.fetch - 1, FETCHED, "", posted))
                events.append((first + copy.drop - 1, DROPPED, "", posted))
                back[first + copy.reader] = posted  # the last one, since they are back in this order
        events.sort()
        counts = np.bincount([op for op, *_ in events], minlength=num_ops) if events else np.zeros(num_ops, np.int64)
        speeds = (1.0, 1.0) if plan is None else (plan.to_host, plan.from_host)
        return cls(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array([3 * copy + event for _, event, _, copy in events], np.int32),
            np.concatenate([np.array(sizes, np.float64) / speed for speed in speeds]),
            back,
        )

    @property
    def num_copies(self) -> int:
        """Copies of all ranks."""
        return len(self.copying) // 2

    def timed(self, plan: HostCopyPlan | None, copied: "Numbers") -> Iterator[TimedCopy]:
        """Yield the copies that have run, by rank and start.

        Args:
            copied: [3 * C] as the loop leaves it.
        """
        if plan is None:
            return
        to_host, from_host = self.copying.reshape(2, -1)
        offloaded, fetched, dropped = copied.reshape(3, -1)
        times = zip(
            *(each.tolist() for each in (offloaded, offloaded + to_host, dropped, fetched, fetched + from_host)),
            strict=True,
        )
        for copies in plan.ranks:
            timed = [(copy.offload, TimedCopy(*copy[:4], *next(times))) for copy in copies]
            yield from (copy for _, copy in sorted(timed, key=lambda each: (each[0], each[1].content)))
