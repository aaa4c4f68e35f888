"""The file of a ledger, which a rank writes when its run stands still."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_ext.plan.programs.program import Instruction
from deepspeed_ext.runtime.ledger.position import Position


@dataclass(frozen=True, slots=True)
class CurrentInstruction:
    """The instruction at which a rank is.

    Attributes:
        instruction: its kind, such as `backward` or `receive gradient`.
        op: the op that it belongs to: `0B0.2`.
        stage: stage of that op.
        micro_batch: micro-batch of that op.
        token_slice: token slice of that op.
        peer: global rank for which it waits; null while it waits for none.
    """

    instruction: str
    op: str
    stage: int
    micro_batch: int
    token_slice: int
    peer: int | None


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """The ledger of a rank, as its file has it. Its fields are the keys.

    Attributes:
        behind: text that names the rank for which all others wait.
        position: where this rank is.
        waiting: the instruction at which it is; null outside of programs.
        stack: where its main thread is in the code, the innermost call last: `FILE:LINE FUNCTION`.
        done: instructions of its program that are done, in order.
        to_do: the instructions that are left; the first one is that of `waiting`.
    """

    behind: str
    position: Position
    waiting: CurrentInstruction | None
    stack: tuple[str, ...]
    done: tuple[str, ...]
    to_do: tuple[str, ...]

    @classmethod
    def of(cls, behind: str, position: Position, program: Sequence[Instruction], stack: Sequence[str]) -> "LedgerFile":
        """Return the ledger of a rank in its program.

        Args:
            behind: text that names the rank behind.
            position: where the rank is.
            program: its instructions.
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
