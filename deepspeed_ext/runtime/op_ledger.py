"""What a rank has done of its program, is doing, and waits for: kept as it runs, to be read when it does not."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepspeed_ext.plan.programs import Instruction
from deepspeed_ext.plan.stall import Position


class OpLedger:
    """The ledger of one rank. The thread that runs the program writes, another may read at any time.

    Args:
        rank: global rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._batch = "no batch yet"
        self._program: Sequence[Instruction] = ()
        self._done = 0
        self._waits_for: int | None = None
        self._since = time.monotonic()

    def begin(self, batch: str, program: Sequence[Instruction]) -> None:
        """Start on a batch."""
        self._batch, self._program, self._done = batch, program, 0
        self._since = time.monotonic()

    def done(self) -> None:
        """The instruction at hand is done."""
        self._done += 1
        self._since = time.monotonic()

    @contextmanager
    def waiting_for(self, rank: int) -> Iterator[None]:
        """Around a wait for another rank."""
        self._waits_for = rank
        yield
        # Not in a `finally`: where the wait fails, it is what the ledger should say.
        self._waits_for = None

    def position(self) -> Position:
        """Where the rank is now."""
        program, done = self._program, self._done
        return Position(
            rank=self._rank,
            batch=self._batch,
            done=done,
            total=len(program),
            doing=str(program[done]) if done < len(program) else "",
            waits_for=self._waits_for,
            seconds=time.monotonic() - self._since,
        )

    def write(self, directory: Path, line: str) -> Path:
        """Write the ledger as JSON.

        Args:
            directory: made where it is missing.
            line: which rank is behind.

        Returns:
            The file.
        """
        position, program = self.position(), self._program
        doing = program[position.done] if position.done < len(program) else None
        fields = {
            "behind": line,
            "position": position.to_fields(),
            "waiting": doing
            and {
                "instruction": doing.kind.value,
                "op": str(doing.op),
                "stage": doing.stage,
                "micro_batch": doing.micro_batch,
                "token_slice": doing.token_slice,
                "peer": position.waits_for,
            },
            "done": [str(instruction) for instruction in program[: position.done]],
            "to_do": [str(instruction) for instruction in program[position.done :]],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{self._rank:05d}.json"
        path.write_text(json.dumps(fields, indent=1) + "\n")
        return path
