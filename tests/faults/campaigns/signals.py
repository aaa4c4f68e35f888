"""SIGTERM and SIGINT to one process of a run under `terapipe train`: the ranks get them, and one line reports it."""

import os
import re
import signal
import time
from collections.abc import Iterator

from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import Launch, flags, terapipe
from tests.faults.campaign import Outcome, Settings

ENDS_S = 60.0
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
        found = run.wait()
        left, seconds = run.wait_for_all(ENDS_S), time.monotonic() - since
        lines = [line for line in run.output().splitlines() if re.match(pattern, line)]
        others = [line for line in run.output().splitlines() if re.match("error:|Traceback", line)]
        broken = [f"exit code {found}"] * (found != code) + [f"{len(left)} processes left"] * bool(left)
        broken += [f"{len(lines)} lines of it"] * (len(lines) != 1)
        broken += [f"also: {line}" for line in others if line not in lines]
        yield Outcome(
            fault=" ".join((sent.name, "to", victim, *more)),
            tried=1,
            longest_s=seconds,
            promised_s=ENDS_S,
            message=lines[0].strip() if lines else "",
            broken=tuple(broken),
        )


def _second_run(run: Launch) -> Outcome:
    code = run.wait()
    lines = [line for line in run.output().splitlines() if line.startswith("error: --save save is in use by another")]
    broken = [f"exit code {code}"] * (code != 2) + [f"{len(lines)} lines"] * (len(lines) != 1)
    return Outcome(fault="a second run with one --save", tried=1, message="".join(lines), broken=tuple(broken))
