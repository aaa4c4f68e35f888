"""A stalled run: the position of each rank, collected over a store, and the rank for which the others wait.

    Position     place of a rank in its program, since when, and the ranks for which it may wait
    RollCall     collects the positions of all ranks over a store
    explain      finds the rank that blocks the run, from all positions

    7/question      set by any rank
    7/answers       the position of each living rank, one line each, appended
    7/verdict       conclusion of the first rank that has read the answers; all others adopt it
    7/adopted       number of ranks that have adopted it

    host/3          host of rank 3, set once: a rank without a sign of life cannot report it

For 1,024 ranks a question costs each of them a few calls of the store.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a rank in its run."""

    rank: int
    """Global rank."""
    batch: str
    """Number of the optimizer step, or of another batch."""
    done: int
    """Instructions done."""
    total: int
    """Instructions of the program; 0 between batches."""
    doing: str
    """Its current instruction, as `Instruction` is written, or the phase; empty between batches."""
    waits_for: int | None = None
    """Global rank that sends or takes the message for which it waits; None if it does not wait."""
    seconds: float = 0.0
    """Since this position last changed."""
    phase: int = 0
    """Number of batches and phases begun so far: all ranks of a run begin the same ones. 0 outside of them."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Collectives that it has started in each group of ranks, by name of the group."""
    code: str = ""
    """Place of its main thread in the code."""
    in_collective: bool = False
    """Whether the main thread is inside of a collective."""
    host_blocked_at: str = ""
    """Instruction at which the host is ahead of its accelerator; empty if it is not, or has enqueued the batch."""

    def __str__(self) -> str:
        """Text for messages."""
        step = f", instruction {self.done + 1} of {self.total}" if self.doing and self.done < self.total else ""
        waits = "" if self.waits_for is None else f", waiting for rank {self.waits_for}"
        if self.host_blocked_at:
            waits += f", its host at '{self.host_blocked_at}' (the device's queue is full, or a kernel is loaded)"
        code = f", in {self.code}" if self.code else ""
        where = f"at '{self.doing}'" if self.doing else "between batches"
        return f"rank {self.rank} is {where} since {self.seconds:.0f} s{waits}{code} ({self.batch}{step})"

    @property
    def place(self) -> tuple[Any, ...]:
        """The fields that change when the rank proceeds."""
        return self.batch, self.done, self.doing, self.waits_for, self.phase, self.collectives


class RollCall:
    """The roll calls of a run, on one rank. Every rank answers every question, so all have the same numbers."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._number = store, rank, 0

    def set_host(self, host: str) -> None:
        """Store the host of this rank."""
        self._store.set(_host_key(self._rank), host)

    def hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        """The known hosts of some ranks, by rank."""
        return {
            rank: self._store.get(_host_key(rank)).decode() for rank in ranks if self._store.check([_host_key(rank)])
        }

    def is_open(self) -> bool:
        """Whether there is a question that this rank has not answered."""
        return bool(self._store.check([self._key("question")]))

    def start(self) -> None:
        """Start a roll call of all ranks."""
        self._store.set(self._key("question"), "")

    def answer(self, position: Position) -> None:
        """Answer the question."""
        self._store.append(self._key("answers"), json.dumps(asdict(position)) + "\n")

    def answers(self) -> dict[int, Position]:
        """The answers so far, by rank."""
        lines = self._store.get(self._key("answers")).decode().splitlines()
        positions = [Position(**json.loads(line)) for line in lines]
        return {position.rank: position for position in positions}

    def has_verdict(self) -> bool:
        """Whether there is a conclusion."""
        return bool(self._store.check([self._key("verdict")]))

    def settle(self, line: str | None) -> tuple[str | None, bool]:
        """Set the conclusion, unless there is one.

        Args:
            line: the conclusion; None for no stall.

        Returns:
            The conclusion of all ranks, and whether this rank's was the first.
        """
        mine = json.dumps([self._rank, line])
        by, settled = json.loads(self._store.compare_set(self._key("verdict"), "", mine))
        return settled, by == self._rank

    def count_adopted(self, more: int = 0) -> int:
        """Number of ranks that have adopted the conclusion."""
        return int(self._store.add(self._key("adopted"), more))

    def next(self) -> None:
        """Close the question: the next one has another number."""
        self._number += 1

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def _host_key(rank: int) -> str:
    return f"host/{rank}"


MOST_RANKS_NAMED = 8
"""Ranks that a line names; of more it gives the number."""


Hosts = Callable[[Sequence[int]], Mapping[int, str]]
"""Returns the known hosts of some ranks."""


def explain(positions: Mapping[int, Position | None], limit_s: float, hosts: Hosts = lambda ranks: {}) -> str | None:
    """One line that names the rank that blocks the run; None if no rank has waited too long for another.

    A rank that does not proceed may just be slow: it compiles, saves or evaluates. So a run has stalled only if such a
    rank waits for another one, or if another one gives no sign of life.

    Args:
        positions: positions of all ranks, by global rank; None for one without a sign of life.
        limit_s: longest time in seconds for which a rank may wait.
    """
    living = {rank: position for rank, position in positions.items() if position is not None}
    stalled = sorted(rank for rank, position in living.items() if position.seconds >= limit_s)
    if not stalled:
        return None
    waits, silent = _Waits(living, limit_s), sorted(positions.keys() - living.keys())
    if silent:
        named = f"{_on_hosts(silent, hosts)} {_verb(silent, 'blocks', 'block')} the run"
        return f"{named}: {_verb(silent, 'it gives', 'they give')} no sign of life{waits.text(stalled)}"
    for rank in stalled:
        reached, ends = waits.chain(rank)
        if ends == [rank] or not living.keys() >= set(ends):
            continue  # It does not wait, or for one that has not answered yet.
        if not ends:
            return (
                f"ranks {_list(reached)} wait for each other{waits.text(stalled)}: a connection between them "
                "is broken, or this is a defect of the engine"
            )
        others = [each for each in stalled if each not in ends]
        named = f"{_on_hosts(ends, hosts)} {_verb(ends, 'blocks', 'block')} the run"
        return f"{named}: {living[ends[0]]}{waits.text(others)}"
    if len(stalled) == len(living) > 1 and all(position.in_collective for position in living.values()):
        return (
            f"ranks {_list(stalled)} are in the same collective, and it does not end{waits.text(stalled)}: a "
            "connection between them is broken"
        )
    return None


def explain_silent_store(position: Position, silent_s: float, hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    """The line of a rank without a store, `silent_s` seconds after its last answer."""
    return (
        f"{_on_hosts([0], lambda _: hosts)} blocks the run: its host serves the store where the ranks met, which has "
        f"not answered for {silent_s:.0f} s; {position}"
    )


class _Waits:
    """The ranks for which each rank waits."""

    def __init__(self, positions: Mapping[int, Position], limit_s: float) -> None:
        self._positions, self._limit_s = positions, limit_s
        members: dict[str, list[int]] = defaultdict(list)
        for rank, position in positions.items():
            for group in position.collectives:
                members[group].append(rank)
        self._members = members
        self._least = {group: min(positions[rank].collectives[group] for rank in of) for group, of in members.items()}

    def chain(self, rank: int) -> tuple[list[int], list[int]]:
        """Ranks that one waits for, directly or not, itself included; and which of them wait for no rank."""
        reached, to_follow, ends = {rank}, [rank], []
        while to_follow:
            others = self._awaited_by(rank := to_follow.pop())
            if not others:
                ends.append(rank)
            to_follow += others - reached
            reached |= others
        return sorted(reached), sorted(ends)

    def text(self, ranks: Sequence[int]) -> str:
        """The end of a line: the ranks that wait, and the place of the first of them."""
        if not ranks:
            return ""
        first = self._positions[ranks[0]]
        group = next((group for group, count in first.collectives.items() if count > self._least[group]), None)
        collective = "" if group is None or first.waits_for is not None else group.partition("#")[0]
        of = f", for a collective of the {collective}" if collective else ""
        others = f", and so {_verb(ranks[1:], 'does', 'do')} {_ranks(ranks[1:])}" if ranks[1:] else ""
        return f"; {first}{of}{others}"

    def _awaited_by(self, rank: int) -> set[int]:
        position = self._positions.get(rank)
        if position is None:
            return set()
        # One that proceeded lately is on its way to where the others wait.
        if position.seconds < self._limit_s / 2:
            return set()
        if position.waits_for is not None:
            return {position.waits_for}
        return self._in_fewer_collectives(position) or self._in_earlier_phases(position)

    def _in_fewer_collectives(self, position: Position) -> set[int]:
        """Ranks that have started the fewest collectives of a group of which this one has started more."""
        return {
            other
            for group, count in position.collectives.items()
            if count > self._least[group]
            for other in self._members[group]
            if self._positions[other].collectives[group] == self._least[group]
        }

    def _in_earlier_phases(self, position: Position) -> set[int]:
        """Ranks of its groups that have not come to the phase of this one.

        The host of an accelerator runs ahead and has started all collectives. Only phases show the place of the device.
        """
        if not position.doing or position.done < position.total:
            return set()
        others = {other for group in position.collectives for other in self._members[group]}
        return {other for other in others if self._positions[other].phase < position.phase}


def _ranks(ranks: Sequence[int | str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"


def _on_hosts(ranks: Sequence[int], hosts: Hosts) -> str:
    """Ranks with their hosts."""
    known = hosts(ranks[:MOST_RANKS_NAMED])
    return _ranks([f"{rank} (host {known[rank]})" if rank in known else rank for rank in ranks])


def _list(ranks: Sequence[int | str]) -> str:
    more = len(ranks) - MOST_RANKS_NAMED
    return ", ".join(map(str, ranks[:MOST_RANKS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _verb(ranks: Sequence[int], of_one: str, of_several: str) -> str:
    return of_one if len(ranks) == 1 else of_several
