"""Explanation of a stalled pipeline: the position of each rank, its wait, and the rank that all others wait for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a rank in the program of a batch.

    Attributes:
        rank: global rank.
        batch: number of the optimizer step, or what else the rank is at.
        done: instructions done.
        total: instructions of the program; 0 between batches.
        doing: the instruction it is at, as `Instruction` is written; empty between batches.
        waits_for: global rank whose message it waits for, or that has yet to take one; None while it computes.
        seconds: since it began that instruction.
    """

    rank: int
    batch: str
    done: int
    total: int
    doing: str
    waits_for: int | None
    seconds: float

    def __str__(self) -> str:
        """Line for a reader."""
        if not self.doing:
            return f"rank {self.rank} is between batches since {self.seconds:.0f} s ({self.batch})"
        waits = "" if self.waits_for is None else f", waiting for rank {self.waits_for}"
        return (
            f"rank {self.rank} is at '{self.doing}' since {self.seconds:.0f} s{waits} "
            f"({self.batch}, instruction {self.done + 1} of {self.total})"
        )

    def to_fields(self) -> dict[str, Any]:
        """The position as JSON fields."""
        return asdict(self)


def explain(positions: Mapping[int, Position | None], stuck: int) -> str:
    """Say in one line which rank is behind, starting from one that waits.

    Args:
        positions: positions of the ranks that could be asked, by global rank; None for one that gave no answer.
        stuck: a rank that waits.
    """
    chain = [stuck]
    while (position := positions.get(chain[-1])) is not None and position.waits_for is not None:
        if position.waits_for in chain:
            circle = [*chain[chain.index(position.waits_for) :], position.waits_for]
            return f"ranks {', '.join(map(str, circle[:-1]))} wait for each other in a circle: this is a fault of ours"
        chain.append(position.waits_for)
    behind = chain[-1]
    waiting = sorted(
        rank
        for rank, position in positions.items()
        if rank != behind and (position is None or position.waits_for is not None)
    )
    ranks = "rank" if len(waiting) == 1 else "ranks"
    others = f"; waiting: {ranks} {', '.join(map(str, waiting))}" if waiting else ""
    if positions.get(behind) is None:
        return f"rank {behind} is behind: it gives no sign of life{others}"
    return f"rank {behind} is behind: {positions[behind]}{others}"


def explain_alone(position: Position) -> str:
    """Say in one line what a rank knows that waits, and cannot ask the others.

    Args:
        position: position of the rank.
    """
    asked = "nobody could be asked, since the store at which the ranks met, which rank 0 keeps, does not answer"
    if position.waits_for == 0:
        return f"rank 0 is behind: it gives no sign of life; waiting: {position}"
    return f"{position}; {asked}"
