"""The position of a rank: what it does, since when, and which other ranks it may wait for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a rank in its run."""

    rank: int
    """Global rank."""
    batch: str
    """Number of the optimizer step, or what else the rank is at."""
    done: int
    """Instructions done."""
    total: int
    """Instructions of the program; 0 between batches."""
    doing: str
    """The instruction it is at, as `Instruction` is written, or the phase; empty between batches."""
    waits_for: int | None = None
    """Global rank whose message it waits for, or that has yet to take one; None while it waits for none."""
    seconds: float = 0.0
    """Since this position last changed."""
    phase: int = 0
    """Number of batches and phases begun so far: all ranks of a run begin the same ones. 0 outside of them."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Collectives that it has started in each group of ranks, by name of the group."""
    code: str = ""
    """Place in the code at which its main thread is."""
    in_collective: bool = False
    """Whether the main thread is inside of a collective."""

    def __str__(self) -> str:
        """Line for a reader."""
        step = f", instruction {self.done + 1} of {self.total}" if self.doing and self.done < self.total else ""
        waits = "" if self.waits_for is None else f", waiting for rank {self.waits_for}"
        code = f", in {self.code}" if self.code else ""
        where = f"at '{self.doing}'" if self.doing else "between batches"
        return f"rank {self.rank} is {where} since {self.seconds:.0f} s{waits}{code} ({self.batch}{step})"

    def to_fields(self) -> dict[str, Any]:
        """The position as JSON fields."""
        return asdict(self)

    def same_place(self, other: "Position") -> bool:
        """Whether the rank has not moved between two looks at it."""
        return (self.batch, self.done, self.doing, self.waits_for, self.phase, self.collectives) == (
            other.batch, other.done, other.doing, other.waits_for, other.phase, other.collectives
        )  # fmt: skip
