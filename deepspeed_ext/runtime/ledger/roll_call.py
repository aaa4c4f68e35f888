"""Questions to all ranks of a run, over a store: where are you?

    7/question      set by any rank that asks
    7/answers       one line from each rank that lives, appended: its position
    7/verdict       what the first rank that has read the answers concludes; all others take it over
    7/heard         number of ranks that have taken it over

    host/3          host of rank 3, set once: a rank that gives no sign of life cannot say it any more

For 1,024 ranks a question costs each of them a few calls of the store.
"""

import json
from collections.abc import Iterable
from typing import Any

from deepspeed_ext.runtime.ledger.position import Position


class RollCall:
    """The questions of a run, as one rank hears them. Every rank answers every question, so all count them alike."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank, self._number = store, rank, 0

    def set_host(self, host: str) -> None:
        """Say on which host this rank is."""
        self._store.set(_host_key(self._rank), host)

    def hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the hosts of those of some ranks that have said theirs, by rank."""
        return {
            rank: self._store.get(_host_key(rank)).decode() for rank in ranks if self._store.check([_host_key(rank)])
        }

    def is_asked(self) -> bool:
        """Whether there is a question that this rank has not dealt with."""
        return bool(self._store.check([self._key("question")]))

    def ask(self) -> None:
        """Ask all ranks."""
        self._store.set(self._key("question"), "")

    def answer(self, position: Position) -> None:
        """Answer the question."""
        self._store.append(self._key("answers"), json.dumps(position.to_fields()) + "\n")

    def answers(self) -> dict[int, Position]:
        """The answers so far, by rank."""
        lines = self._store.get(self._key("answers")).decode().splitlines()
        positions = [Position(**json.loads(line)) for line in lines]
        return {position.rank: position for position in positions}

    def has_verdict(self) -> bool:
        """Whether some rank has concluded."""
        return bool(self._store.check([self._key("verdict")]))

    def settle(self, line: str | None) -> tuple[str | None, bool]:
        """Conclude, unless another rank has.

        Args:
            line: the conclusion; None if all is well.

        Returns:
            The conclusion of all ranks, and whether this rank's was the first.
        """
        mine = json.dumps([self._rank, line])
        by, settled = json.loads(self._store.compare_set(self._key("verdict"), "", mine))
        return settled, by == self._rank

    def count_heard(self, more: int = 0) -> int:
        """Number of ranks that have heard the conclusion."""
        return int(self._store.add(self._key("heard"), more))

    def next(self) -> None:
        """The question is dealt with: expect another."""
        self._number += 1

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"


def _host_key(rank: int) -> str:
    return f"host/{rank}"
