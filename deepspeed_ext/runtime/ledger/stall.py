"""Explanation of a run that stands still: from the position of each rank, the rank for which the others wait.

A transfer tells for whom a rank waits. A collective does not; but of its ranks the one that has started fewer of them
is missing. From a rank that stands still, "waits for" leads to one that does not wait, or that gives no sign of life:

    rank 0: transfer of rank 1 -> rank 1: collective with rank 3, its fifth -> rank 3: has started four, is behind
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from deepspeed_ext.runtime.ledger.position import Position

MOST_RANKS_NAMED = 8
"""Ranks that a line names; of more it tells the number."""


Hosts = Callable[[Sequence[int]], Mapping[int, str]]
"""Returns the hosts of some ranks, of those that are known."""


def explain(positions: Mapping[int, Position | None], limit_s: float, hosts: Hosts = lambda ranks: {}) -> str | None:
    """Say in one line which rank is behind; None if no rank has waited too long for another.

    A rank that stands still may just take long: compile, save, evaluate. So there is no stall unless one that stands
    still waits for another, or does so while another gives no sign of life.

    Args:
        positions: positions of all ranks, by global rank; None for one that gave no sign of life.
        limit_s: longest time in seconds for which a rank may wait.
    """
    living = {rank: position for rank, position in positions.items() if position is not None}
    standing = sorted(rank for rank, position in living.items() if position.seconds >= limit_s)
    if not standing:
        return None
    waits, silent = _Waits(living, limit_s), sorted(positions.keys() - living.keys())
    if silent:
        named = f"{_on_hosts(silent, hosts)} {_is(silent)} behind"
        return f"{named}: {_gives(silent)} no sign of life{waits.told_by(standing)}"
    for rank in standing:
        reached, ends = waits.chain(rank)
        if ends == [rank] or not living.keys() >= set(ends):
            continue  # It does not wait, or for one of which nothing is known yet.
        if not ends:
            return (
                f"ranks {_list(reached)} wait for each other{waits.told_by(standing)}: a connection between them "
                "carries nothing any more, or this is a fault of ours"
            )
        others = [each for each in standing if each not in ends]
        return f"{_on_hosts(ends, hosts)} {_is(ends)} behind: {living[ends[0]]}{waits.told_by(others)}"
    if len(standing) == len(living) > 1 and all(position.in_collective for position in living.values()):
        return (
            f"ranks {_list(standing)} are in the same collective, and it does not end{waits.told_by(standing)}: a "
            "connection between them carries nothing any more"
        )
    return None


def explain_alone(position: Position, silent_s: float, hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    """Say in one line what a rank knows that can ask nobody.

    Args:
        silent_s: seconds since the store was last heard of.
        hosts: those that are known, by rank.
    """
    return (
        f"{_on_hosts([0], lambda _: hosts)} is behind: its host keeps the store at which the ranks met, and that gives "
        f"no sign of life since {silent_s:.0f} s; {position}"
    )


class _Waits:
    """For whom each rank waits."""

    def __init__(self, positions: Mapping[int, Position], limit_s: float) -> None:
        self._positions, self._limit_s = positions, limit_s
        members: dict[str, list[int]] = defaultdict(list)
        for rank, position in positions.items():
            for group in position.collectives:
                members[group].append(rank)
        self._members = members
        self._least = {group: min(positions[rank].collectives[group] for rank in of) for group, of in members.items()}

    def chain(self, rank: int) -> tuple[list[int], list[int]]:
        """Ranks that one waits for, directly or not, itself included; and those of them that wait for nobody."""
        reached, to_follow, ends = {rank}, [rank], []
        while to_follow:
            others = self._awaited_by(rank := to_follow.pop())
            if not others:
                ends.append(rank)
            to_follow += others - reached
            reached |= others
        return sorted(reached), sorted(ends)

    def told_by(self, ranks: Sequence[int]) -> str:
        """The end of a line: which ranks wait, and where the first of them does."""
        if not ranks:
            return ""
        first = self._positions[ranks[0]]
        group = next((group for group, count in first.collectives.items() if count > self._least[group]), None)
        collective = "" if group is None or first.waits_for is not None else group.partition("#")[0]
        of = f", for a collective of the {collective}" if collective else ""
        others = f", and so {_do(ranks[1:])} {_ranks(ranks[1:])}" if ranks[1:] else ""
        return f"; {first}{of}{others}"

    def _awaited_by(self, rank: int) -> set[int]:
        position = self._positions.get(rank)
        if position is None:
            return set()
        # One that moved lately is on its way to where the others wait.
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

        The host of an accelerator runs ahead and has started all collectives. Where the accelerator is, phases show.
        """
        if not position.doing or position.done < position.total:
            return set()
        others = {other for group in position.collectives for other in self._members[group]}
        return {other for other in others if self._positions[other].phase < position.phase}


def _ranks(ranks: Sequence[int | str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_list(ranks)}"


def _on_hosts(ranks: Sequence[int], hosts: Hosts) -> str:
    """Ranks with the hosts where somebody has to look."""
    known = hosts(ranks[:MOST_RANKS_NAMED])
    return _ranks([f"{rank} (host {known[rank]})" if rank in known else rank for rank in ranks])


def _list(ranks: Sequence[int | str]) -> str:
    more = len(ranks) - MOST_RANKS_NAMED
    return ", ".join(map(str, ranks[:MOST_RANKS_NAMED])) + (f" and {more} more" if more > 0 else "")


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _do(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def _gives(ranks: Sequence[int]) -> str:
    return "it gives" if len(ranks) == 1 else "they give"
