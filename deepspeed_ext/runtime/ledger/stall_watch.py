"""Watches over a rank: when its pipeline stands still, says which rank is behind and writes the ledgers.

Ranks that stand still cannot talk over their communicators, on which they wait for each other. So a thread of each
rank looks after it, and the threads talk over the store by which the ranks met:

    rank 0   waits for rank 1 too long --> asks -----> reads the answers: "rank 2 is behind"; writes its ledger
    rank 1   waits for rank 2                 '-> answers, writes its ledger
    rank 2   computes for ever                '-> answers, writes its ledger

The store is kept by a rank, which may be the one that has stopped. A second thread, which asks nobody, then writes
the ledger of its own rank and says what that rank knows.
"""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.ledger.op_ledger import OpLedger
from deepspeed_ext.runtime.ledger.stall import Position, explain, explain_alone

_PATIENCE, _LAST_MOMENT = 0.7, 0.9
"""Parts of the timeout of transfers: after the first a wait is a stall, soon enough to ask; by the second, when
communicators are about to give up, there should have been an answer."""

_ANSWERS = 3
"""Looks at the store that a living rank surely takes while another waits for answers."""

_PARTING_S = 10.0
"""How long to wait for a thread that is to end: calls to a store that answers take less, on a busy host too."""


class StallWatch:
    """The threads that look after one rank.

    Args:
        ledger: ledger of this rank.
        rank: this rank.
        peers: ranks of its pipeline, itself included.
        name: name of the pipeline, the same on its ranks and no other's: under it they ask and answer.
        store: that all ranks share.
        timeout: longest time that a transfer may take.
        directory: directory of the ledgers.
        say: prints a line.
    """

    def __init__(
        self,
        ledger: OpLedger,
        *,
        rank: int,
        peers: Sequence[int],
        name: str,
        store: Any,
        timeout: timedelta,
        directory: Path,
        say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._ledger, self._rank, self._peers, self._store = ledger, rank, peers, store
        self._patience_s = _PATIENCE * timeout.total_seconds()
        self._interval_s = min(max(self._patience_s / 20, 0.05), 5.0)
        asked_s = self._patience_s + 2 * _ANSWERS * self._interval_s
        self._last_moment_s = max(_LAST_MOMENT * timeout.total_seconds(), asked_s)
        self._directory, self._say = directory, say
        self._name, self._num_stalls = name, 0
        # Batch and instruction at which this rank last stood still: said once, also if it goes on after a long time.
        self._told: tuple[str, int] | None = None
        self._ended = threading.Event()
        device = get_accelerator().current_device()
        self._threads = [
            threading.Thread(target=self._on_device, args=(device, run), name="stall watch", daemon=True)
            for run in (self._ask, self._ask_nobody)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        # A thread that Python kills in the middle of a call to the store takes the process down with it. Whoever drops
        # the last reference to an engine ends its watch, and that may be this very thread.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=_PARTING_S)

    def _on_device(self, device: int, run: Callable[[], None]) -> None:
        # A thread starts on the first device of the host, and to ask for an event there would take memory of it.
        get_accelerator().set_device(device)
        run()

    def _ask(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._look()
            except RuntimeError:
                return  # The store is gone; the other thread goes on.

    def _ask_nobody(self) -> None:
        while not self._ended.wait(self._interval_s):
            position = self._ledger.position()
            at = position.batch, position.done
            if position.waits_for is not None and position.seconds > self._last_moment_s and at != self._told:
                self._told = at
                self._write_and_say(explain_alone(position), speaks=True)

    def _look(self) -> None:
        position = self._ledger.position()
        at = position.batch, position.done
        if position.waits_for is not None and position.seconds > self._patience_s and at != self._told:
            self._store.set(self._question, "")
        elif not self._store.check([self._question]):
            return
        self._answer(position)
        self._report(self._answers())
        self._told, self._num_stalls = at, self._num_stalls + 1

    @property
    def _question(self) -> str:
        """Key in the store. Every rank answers every question, so all count stalls alike."""
        return f"stalled/{self._name}/{self._num_stalls}"

    def _answer(self, position: Position) -> None:
        self._store.set(self._answer_of(self._rank), json.dumps(position.to_fields()))

    def _answers(self) -> dict[int, Position | None]:
        """Positions of all ranks of the pipeline, after the time in which a living rank answers."""
        self._ended.wait(_ANSWERS * self._interval_s)
        return {rank: self._read(rank) for rank in self._peers}

    def _read(self, rank: int) -> Position | None:
        key = self._answer_of(rank)
        return Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _answer_of(self, rank: int) -> str:
        return f"{self._question}/{rank}"

    def _report(self, positions: dict[int, Position | None]) -> None:
        waiting = [rank for rank, position in positions.items() if position and position.waits_for is not None]
        line = explain(positions, waiting[0] if waiting else self._rank)
        # One rank speaks for all of its pipeline.
        self._write_and_say(line, speaks=self._rank == (waiting or [self._rank])[0])

    def _write_and_say(self, line: str, *, speaks: bool) -> None:
        try:
            where = f"the ledger of each rank is in {self._ledger.write(self._directory, line).parent}"
        except OSError as error:
            where = f"ledgers cannot be written to {self._directory} ({error.strerror})"
        if speaks:
            self._say(f"the pipeline stands still: {line}; {where}")
