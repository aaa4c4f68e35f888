"""The ledger of a rank: instructions done, the current one and its peer, started collectives, the place in the code.

An accelerator is later than its host, which enqueues a wait and continues. So there the ledger keeps the places of the
host until the accelerator has reached the same place in its queue:

    host          done 0 | waits for 1 | came | done 1 |  ...           all enqueued at once
    accelerator   ......... done 0, waiting for rank 1                  the position
    shown by      event               event     event

An event after each op and each wait shows the place of the accelerator; an instruction that takes it no time, such as
to post a message, is done with the one before. A thread of its own, `follow`, waits for the events: to query one holds
the lock of Python's interpreter, and blocks while a module is loaded. No other thread calls the device for the ledger,
and no lock is held over a call that may block, such as to record an event in a full queue.

Outside of programs a rank is in phases, such as `sums over replicas` or `saving`, of which all ranks have the same.
Torch counts the collectives that a rank has started, so a step has no cost for it. Of two ranks of a group, the one
that has started more waits for the other.
"""

import json
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

from deepspeed_ext.plan.programs.program import COMPUTES, Instruction
from deepspeed_ext.runtime.health.stall import Position

_LIBRARIES = tuple(f"/site-packages/{name}/" for name in ("torch", "deepspeed"))
_MOST_FRAMES = 40


def main_stack() -> traceback.StackSummary:
    """Stack of the main thread, its innermost frame last; empty if it has ended."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return traceback.StackSummary()
    return traceback.StackSummary.extract(list(traceback.walk_stack(frame))[:_MOST_FRAMES][::-1], lookup_lines=True)


def innermost_caller(stack: traceback.StackSummary) -> str:
    """The innermost place that is not in torch or DeepSpeed: `save.py:88 save_checkpoint`; empty if there is none."""
    for frame in reversed(stack):
        if not any(library in frame.filename for library in _LIBRARIES):
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
    return ""


def is_in_collective(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in a call of a collective, or in the wait for one."""
    if not stack:
        return False
    last = stack[-1]
    return last.filename.endswith("torch/distributed/distributed_c10d.py") or ".wait(" in (last.line or "")


class Collectives:
    """The counts of this rank, by group."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._before: dict[str, int] = {}

    def name(self, group: dist.ProcessGroup | None, words: str) -> None:
        """Give a group a name for messages, the same on all of its ranks."""
        if group is not None:
            self._words.setdefault(group.group_name, words)

    def leave_out(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Ignore some groups: those for messages, which some backends count as collectives."""
        self._left_out.update(group.group_name for group in groups)

    def reset(self) -> None:
        """Count from zero, from the same place of the program on all ranks.

        When it is made, DeepSpeed's engine sends a message to each neighbour in the group of all ranks. Some backends
        count messages as collectives, and ranks at the ends of a pipeline have fewer neighbours.
        """
        self._before = self._all()

    def counts(self) -> dict[str, int]:
        """Collectives started, by words and name of the group; from any thread."""
        return {
            f"{self._words.get(name, 'group')}#{name}": count - self._before.get(name, 0)
            for name, count in self._all().items()
            if name not in self._left_out
        }

    def _all(self) -> dict[str, int]:
        # A copy, since the main thread may be making a group.
        groups = [group for group in list(distributed_c10d._world.pg_map) if group.size() > 1]
        counts = {}
        for group in groups:
            with suppress(RuntimeError):  # of a backend that does not count
                counts[group.group_name] = group._get_sequence_number_for_group()
        return counts


Mark = Callable[[], Callable[[], object]]
"""Marks the current end of the accelerator's queue, and returns a function that waits until it has been reached. The
function is called once, by another thread, and does not hold the lock of Python's interpreter while it waits."""


class _State(NamedTuple):
    batch: str
    program: Sequence[Instruction]
    done: int
    waits_for: int | None
    phase: str = ""
    number: int = 0
    """Of the batch or phase, counted from the first."""


class OpLedger:
    """The ledger of one rank. The thread that runs the program writes, another may read at any time.

    Args:
        mark: see `Mark`; None where the host computes. Places are marked while `follow` runs.
    """

    def __init__(self, rank: int, mark: Mark | None = None) -> None:
        self._rank, self._mark = rank, mark
        self.has_device = mark is not None
        """Whether there is a device to follow."""
        self._on_host = self._reached = _State("no batch yet", (), 0, None)
        self.collectives = Collectives()
        """Collectives that this rank has started."""
        self._ahead: deque[tuple[Callable[[], object] | None, _State]] = deque()
        self._followed = False

    def begin(self, batch: str, program: Sequence[Instruction]) -> None:
        """Start on a batch."""
        self._note(_State(batch, program, 0, None, number=self._on_host.number + 1), self._mark)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a phase of all ranks, other than a program."""
        before = self._on_host
        self._note(before._replace(phase=name, number=before.number + 1), self._mark)
        yield
        # Not in a `finally`: after a failure, the ledger should keep it.
        self._note(self._on_host._replace(phase=before.phase, number=self._on_host.number + 1), self._mark)

    @property
    def untouched(self) -> bool:
        """Whether no instruction of the batch is done yet."""
        return self._on_host.done == 0

    def done(self) -> None:
        """Note that the current instruction is done."""
        state = self._on_host
        is_op = state.done < len(state.program) and state.program[state.done].kind in COMPUTES
        self._note(state._replace(done=state.done + 1), self._mark if is_op else None)

    @contextmanager
    def waiting_for(self, rank: int) -> Iterator[None]:
        """Around a wait for another rank."""
        self._note(self._on_host._replace(waits_for=rank), None)
        yield
        # Not in a `finally`: after a failure, the ledger should keep it.
        self._note(self._on_host._replace(waits_for=None), self._mark)

    def position(self) -> Position:
        """Current position of the rank, without a call of the device."""
        return self._now()[0]

    def _now(self) -> tuple[Position, Sequence[Instruction]]:
        """Current position of the rank, and its program."""
        host, state = self._on_host, self._reached
        instruction, enqueued = (
            str(each.program[each.done]) if each.done < len(each.program) else "" for each in (state, host)
        )
        # A phase may end with a wait for the device; an instruction waits for it only where the queue is full.
        is_ahead = self._followed and not host.phase and (host.number, host.done) != (state.number, state.done)
        position = Position(
            rank=self._rank,
            batch=state.batch,
            done=state.done,
            total=len(state.program),
            doing=state.phase or instruction,
            waits_for=state.waits_for,
            phase=state.number,
            collectives=self.collectives.counts(),
            host_blocked_at=enqueued if is_ahead else "",
        )
        return position, state.program

    def _note(self, state: _State, mark: Mark | None) -> None:
        """Note the state of the host; without a mark, the accelerator reaches it together with the one before."""
        if self._mark is None or not self._followed:
            self._reached = state
        else:
            self._ahead.append((None if mark is None else mark(), state))
        self._on_host = state

    def follow(self, ended: threading.Event, interval_s: float) -> None:
        """Follow the accelerator until the end; runs in a thread of its own."""
        self._followed = True
        while not ended.wait(interval_s):
            # Only those that are there now: a step makes the thread wake few times.
            for _ in range(len(self._ahead)):
                wait, state = self._ahead.popleft()
                if wait is not None:
                    with suppress(RuntimeError):  # of a device that has failed, which the host finds too
                        wait()
                self._reached = state
        self._followed = False

    def write(self, directory: Path, reason: str, seen: Position) -> Path:
        """Write the ledger of this rank into a directory, made where it is missing, and return the file.

        Args:
            reason: text that names the rank for which all others wait.
            seen: position at the last look at the rank, with its time and its place in the code.

        Raises:
            OSError: if it cannot be written.
        """
        position, program = self._now()
        # If it has proceeded since the look, it has not waited yet.
        seconds = seen.seconds if position.place == seen.place else 0.0
        position = replace(position, seconds=seconds, code=seen.code, in_collective=seen.in_collective)
        at = program[position.done] if position.done < len(program) else None
        fields = {
            "behind": reason,
            "position": asdict(position),
            "waiting": at
            and {
                "instruction": at.kind.value,
                "op": str(at.op),
                "stage": at.stage,
                "micro_batch": at.micro_batch,
                "token_slice": at.token_slice,
                "peer": position.waits_for,
            },
            # The innermost call last.
            "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in main_stack()],
            "done": [str(each) for each in program[: position.done]],
            "to_do": [str(each) for each in program[position.done :]],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{self._rank:05d}.json"
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        return path


def accelerator_mark() -> Mark | None:
    """Function that marks a place in the queue of this host's accelerator; None where the host computes."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None

    free: list[Any] = []
    # Otherwise the thread that waits would occupy a core.
    sleeps = {"blocking": True} if accelerator.device_name() == "cuda" else {}

    def mark() -> Callable[[], object]:
        event = free.pop() if free else accelerator.Event(**sleeps)
        event.record()

        def wait() -> None:
            event.synchronize()
            free.append(event)

        return wait

    return mark
