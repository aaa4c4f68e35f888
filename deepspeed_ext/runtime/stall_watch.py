"""Watches over a rank: when its pipeline stands still, says which rank is behind and writes the ledgers.

Ranks that stand still cannot talk over their communicators, on which they wait for each other. So a thread of each
rank looks after it, and the threads talk over the store by which the ranks met:

    rank 0   waits for rank 1 too long --> asks -----> reads the answers: "rank 2 is behind"; writes its ledger
    rank 1   waits for rank 2                 '-> answers, writes its ledger
    rank 2   computes for ever                '-> answers, writes its ledger
"""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.stall import Position, explain
from deepspeed_ext.runtime.op_ledger import OpLedger

_PATIENCE = 0.8
"""Part of the timeout of transfers after which a wait is a stall: soon enough to ask before communicators give up."""


class StallWatch:
    """The thread that looks after one rank.

    Args:
        ledger: of this rank.
        rank: this rank.
        peers: ranks of its pipeline, itself included.
        store: that all ranks share.
        timeout: how long a transfer may take.
        directory: where ledgers are written.
        say: prints a line.
    """

    def __init__(
        self,
        ledger: OpLedger,
        *,
        rank: int,
        peers: Sequence[int],
        store: Any,
        timeout: timedelta,
        directory: Path,
        say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._ledger, self._rank, self._peers, self._store = ledger, rank, peers, store
        self._patience_s = _PATIENCE * timeout.total_seconds()
        self._interval_s = min(max(self._patience_s / 20, 0.05), 5.0)
        self._directory, self._say = directory, say
        self._question = f"stalled/{min(peers)}"
        self._ended = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s) and not self._reported:
            try:
                self._look()
            except RuntimeError:
                return  # The store is gone: so is the rank that keeps it, and with it the run.

    def _look(self) -> None:
        position = self._ledger.position()
        if position.waits_for is not None and position.seconds > self._patience_s:
            self._store.set(self._question, "")
            self._answer(position)
            self._report(self._answers())
        elif self._store.check([self._question]):
            self._answer(position)
            self._report(self._answers())

    def _answer(self, position: Position) -> None:
        self._store.set(self._answer_of(self._rank), json.dumps(position.to_fields()))

    def _answers(self) -> dict[int, Position | None]:
        """Where all ranks of the pipeline are, after the time in which a living one answers."""
        self._ended.wait(3 * self._interval_s)
        return {rank: self._read(rank) for rank in self._peers}

    def _read(self, rank: int) -> Position | None:
        key = self._answer_of(rank)
        return Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _answer_of(self, rank: int) -> str:
        return f"{self._question}/{rank}"

    def _report(self, positions: dict[int, Position | None]) -> None:
        self._reported = True
        waiting = [rank for rank, position in positions.items() if position and position.waits_for is not None]
        line = explain(positions, waiting[0] if waiting else self._rank)
        path = self._ledger.write(self._directory, line)
        # One rank speaks for all of its pipeline.
        if self._rank == (waiting or [self._rank])[0]:
            self._say(f"the pipeline stands still: {line}; the ledger of each rank is in {path.parent}")
