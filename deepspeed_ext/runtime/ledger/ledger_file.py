"""The file of a ledger, which a rank writes when its run stands still."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_ext.plan.programs.program import Instruction
from deepspeed_ext.runtime.ledger.position import Position


@dataclass(frozen=True, slots=True)
class CurrentInstruction:
    """The instruction at which a rank is."""

    instruction: str
    """Its kind, such as `backward` or `receive gradient`."""
    op: str
    """The op that it belongs to: `0B0.2`."""
    stage: int
    """Stage of that op."""
    micro_batch: int
    """Micro-batch of that op."""
    token_slice: int
    """Token slice of that op."""
    peer: int | None
    """Global rank for which it waits; null while it waits for none."""


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """The ledger of a rank, as its file has it. Its fields are the keys."""

    behind: str
    """Text that names the rank for which all others wait."""
    position: Position
    """Where this rank is."""
    waiting: CurrentInstruction | None
    """The instruction at which it is; null outside of programs."""
    stack: tuple[str, ...]
    """Where its main thread is in the code, the innermost call last: `FILE:LINE FUNCTION`."""
    done: tuple[str, ...]
    """Instructions of its program that are done, in order."""
    to_do: tuple[str, ...]
    """The instructions that are left; the first one is that of `waiting`."""

    @classmethod
    def of(cls, behind: str, position: Position, program: Sequence[Instruction], stack: Sequence[str]) -> "LedgerFile":
        """Return the ledger of a rank in its program.

        Args:
            behind: text that names the rank behind.
            stack: where its main thread is in the code.
        """
        at = program[position.done] if position.done < len(program) else None
        waiting = at and CurrentInstruction(
            instruction=at.kind.value,
            op=str(at.op),
            stage=at.stage,
            micro_batch=at.micro_batch,
            token_slice=at.token_slice,
            peer=position.waits_for,
        )
        texts = tuple(map(str, program))
        return cls(behind, position, waiting, tuple(stack), texts[: position.done], texts[position.done :])

    def write(self, directory: Path) -> Path:
        """Write the file, and return it.

        Args:
            directory: made where it is missing.

        Raises:
            OSError: if it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{self.position.rank:05d}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path
