"""Campaigns: faults of one class, made many times, and their outcomes."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measuring.report import Section
from tests import warm
from tests.end_to_end.launching import PRETRAIN, Launch, error_lines

ENDS_S = 60.0
"""Promised seconds from a fault to the end of the last process, where no other time is promised."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a campaign."""

    folder: Path
    """An empty folder for its files."""
    quick: bool
    """Whether to make each fault once or a few times only."""
    seed: int
    """Seed of random choices."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one fault, made once or more often."""

    fault: str
    """The fault: `kill -9 of rank 1 while it saves`."""
    tried: int
    longest_s: float | None = None
    """Seconds from the fault to the end of the last process; None where nothing has to end."""
    promised_s: float | None = None
    """Seconds that were promised for it."""
    message: str = ""
    """The line that a user reads."""
    broken: tuple[str, ...] = ()
    """Promises that were not kept, a line each: `2 processes left`, `3 iterations lost`."""

    @property
    def all_broken(self) -> tuple[str, ...]:
        """Promises that were not kept, the time to the end among them."""
        late = self.longest_s is not None and self.promised_s is not None and self.longest_s > self.promised_s
        return (*self.broken, *([f"ended after {self.longest_s:.0f} s, not {self.promised_s:.0f}"] if late else []))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a launched run after a fault."""

    code: int
    output: str
    seconds: float
    """From the fault to the end of the last process, or to the end of the wait for it."""
    left: int
    """Processes that were left."""

    @property
    def lines(self) -> list[str]:
        """Lines with an error."""
        return error_lines(self.output)

    def outcome(
        self, fault: str, *, code: int | None, lines: list[str], broken: Iterable[str] = (), promised_s: float = ENDS_S
    ) -> Outcome:
        """Outcome of the fault: one line, the exit code, no process left and no traceback, and more broken promises.

        Args:
            code: exit code that was promised; None = any but 0.
            lines: of the output that report the fault.
        """
        wrong = self.code == 0 if code is None else self.code != code
        found = [f"exit code {self.code}"] * wrong + [f"{len(lines)} lines: {lines[:2]}"] * (len(lines) != 1)
        found += [f"{self.left} processes left"] * bool(self.left) + ["a traceback"] * ("Traceback" in self.output)
        return Outcome(
            fault=fault,
            tried=1,
            longest_s=self.seconds,
            promised_s=promised_s,
            message=lines[0].strip().removeprefix("error: ") if lines else "",
            broken=(*found, *broken),
        )


def ending(run: Launch, since: float | None = None) -> Ending:
    """Wait for the end of a run and of all its processes, and end what is left.

    Args:
        since: time of the fault on the monotonic clock; None = now.
    """
    since = time.monotonic() if since is None else since
    code = run.wait()
    left = run.wait_for_all(ENDS_S)
    seconds = time.monotonic() - since
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return Ending(code=code, output=run.output(), seconds=seconds, left=len(left))


def forked(folder: Path, words: list[str]) -> Ending:
    """The end of a run of two ranks without a launcher, forked from warm processes: for what no launcher changes."""
    done = warm.run(["deepspeed", "--num_accelerators", "2", str(PRETRAIN), *words], folder)
    return Ending(code=done.returncode, output=done.stdout + done.stderr, seconds=0.0, left=0)


def together(fault: str, outcomes: Sequence[Outcome]) -> Outcome:
    """One row for a fault that was made several times: the longest time, the last message, all broken promises."""
    last = next((each for each in reversed(outcomes) if each.message), outcomes[-1])
    return replace(
        last,
        fault=fault,
        tried=sum(each.tried for each in outcomes),
        longest_s=max((each.longest_s for each in outcomes if each.longest_s is not None), default=None),
        broken=tuple(line for each in outcomes for line in each.broken),
    )


Campaign = Callable[[Settings], Iterator[Outcome]]
"""Makes the faults of one class, and yields the outcome of each as soon as it is known."""


def table(title: str) -> Section:
    """Return the empty table of a campaign."""
    return Section(title, ("fault", "tried", "ended after, s", "promised, s", "message", "promises kept"))


def add(section: Section, outcome: Outcome) -> None:
    """Append the row of an outcome."""
    section.add(
        outcome.fault,
        outcome.tried,
        "" if outcome.longest_s is None else f"{outcome.longest_s:.0f}",
        "" if outcome.promised_s is None else f"{outcome.promised_s:.0f}",
        outcome.message,
        "; ".join(f"NO: {line}" for line in outcome.all_broken) or "yes",
    )


def until(condition: Callable[[], bool], longest_s: float) -> bool:
    """Wait for a condition, and return whether it came in time."""
    deadline = time.monotonic() + longest_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
