"""SIGTERM and SIGINT to one process of a run under `terapipe train`: the ranks get them, and one line reports it."""

import os
import re
import signal
import time
from collections.abc import Iterator

from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import Launch, flags, terapipe
from tests.faults.campaign import Outcome, Settings, ending

TERMINATED = r"error: rank \d .* received SIGTERM, directly or from its launcher: resume with --load save, from global_"
SIGNALS: list[tuple[str, signal.Signals, tuple[str, ...], int, str]] = [
    ("rank 1", signal.SIGTERM, (), 143, TERMINATED.replace(r"\d", "1")),
    ("the launcher", signal.SIGTERM, (), 1, TERMINATED),
    ("the command", signal.SIGTERM, (), 143, TERMINATED),
    ("the command", signal.SIGTERM, ("--exit-signal-handler",), 0, " exiting after iteration .* a SIGTERM came"),
    ("the command", signal.SIGINT, (), 130, "interrupted: resume with --load save, from global_step"),
]
"""Victim, signal, flags, exit code, and the line."""
TRAINING = ("--train-iters", 10**6, "--eval-iters", 0, "--save", "save", "--save-interval", 4)


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Send each signal; before the first, start a second run with the same --save."""
    data = write_corpus(settings.folder)
    for number, (victim, sent, more, code, pattern) in enumerate(SIGNALS):
        folder = settings.folder / str(number)
        words = flags(data, *TRAINING, "--keep-last-n-checkpoints", 2, *more)
        run = Launch(folder, words, launcher=terapipe())
        run.wait_for((folder / "save" / "latest").exists)
        if number == 0:
            yield _second_run(Launch(folder, words, launcher=terapipe()))
        since = time.monotonic()
        os.kill(run.processes()[victim], sent)
        end = ending(run, since)
        lines = [line for line in end.output.splitlines() if re.match(pattern, line)]
        others = [f"also: {line}" for line in end.lines if line not in lines]
        yield end.outcome(" ".join((sent.name, "to", victim, *more)), code=code, lines=lines, broken=others)


def _second_run(run: Launch) -> Outcome:
    end = ending(run)
    lines = [line for line in end.lines if line.startswith("error: --save save is in use by another")]
    return end.outcome("a second run with one --save", code=2, lines=lines)
