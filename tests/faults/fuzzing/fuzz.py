"""The campaign of fuzzing: many inputs on each parser, in processes that may hang or die."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.measuring.report import progress
from tests.faults.campaign import Outcome, Settings
from tests.faults.fuzzing.child import SOURCES, read_current, write_fault
from tests.faults.fuzzing.target import Target
from tests.faults.fuzzing.targets import targets

SHARES = {"edits": 0.7, "coverage": 0.3}
"""Share of the inputs from each source. Without atheris all are made by edits."""

_START_S = 180.0
"""Time for a process to start."""

_DEATHS = 5
"""Processes that may die on one parser before the others are left out."""


@dataclass(frozen=True)
class Fuzzed:
    """Result of many inputs of a parser."""

    tried: int
    seconds: float
    """Time that they took, the start of processes included."""
    faults: tuple[tuple[str, Path], ...]
    """Kind of each fault, and the file with the input that made it."""


def fuzz(target: Target, folder: Path, inputs: int, seed: int) -> Fuzzed:
    """Try inputs on a parser."""
    start = time.monotonic()
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    shares = dict(SHARES)
    if find_spec("atheris") is None:
        shares["edits"] += shares.pop("coverage")
    tried = 0
    for source in (each for each in SOURCES if each in shares):
        wanted = round(inputs * shares[source])
        done = deaths = 0
        while done < wanted and deaths < _DEATHS:
            number, died = _run_child(target, folder, source, wanted - done, seed + deaths)
            done += number
            if died is None:
                break
            deaths += 1
            write_fault(folder, read_current(folder), died, f"{source}, seed {seed + deaths - 1}")
        tried += done
    texts = sorted((folder / "faults").glob("*.txt"))
    faults = tuple((text.read_text().splitlines()[0], text.with_suffix(".input")) for text in texts)
    return Fuzzed(tried, time.monotonic() - start, faults)


def _run_child(target: Target, folder: Path, source: str, inputs: int, seed: int) -> tuple[int, str | None]:
    """Start a process and wait for its end.

    Returns:
        The inputs that it tried, and how it died; None if it did not.
    """
    for name in ("tried", "current"):
        (folder / name).unlink(missing_ok=True)
    words = [sys.executable, "-m", "tests.faults.fuzzing.child", target.name, str(folder.resolve())]
    words += ["--source", source, "--inputs", str(inputs), "--seed", str(seed)]
    with open(folder / "output", "wb") as output:
        child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            hung = _wait(child, folder, patience=60 * target.seconds)
        finally:
            child.kill()
            child.wait()
    tried = _number(folder)
    if hung:
        return tried, "hangs, and is deaf to signals"
    if child.returncode:
        last = (folder / "output").read_text(errors="replace").splitlines()[-1:] or [""]
        return tried, f"the process dies with exit code {child.returncode}: {last[0][:200]}"
    return tried, None


def _wait(child: "subprocess.Popen[bytes]", folder: Path, patience: float) -> bool:
    """Wait for the end of a process. Returns whether it hangs instead."""
    current, seen, since = folder / "current", 0.0, time.monotonic()
    while child.poll() is None:
        changed = current.stat().st_mtime if current.exists() else 0.0
        if changed != seen:
            seen, since = changed, time.monotonic()
        if time.monotonic() - since > (patience if seen else _START_S):
            return True
        time.sleep(0.1)
    return False


def _number(folder: Path) -> int:
    noted = folder / "tried"
    return int(noted.read_text() or 0) if noted.exists() else 0


INPUTS, QUICK_INPUTS = 100_000, 2_000
"""Inputs for each parser."""

KEPT = Path("runs/faults/inputs")
"""Folder for the inputs that broke a promise. They belong to the `found` of their target after the fix."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each parser."""
    for target in targets():
        folder = settings.folder / target.name.replace(" ", "-")
        done = fuzz(target, folder, QUICK_INPUTS if settings.quick else INPUTS, settings.seed + 1)
        kept = KEPT / folder.name
        if done.faults:
            shutil.copytree(folder / "faults", kept, dirs_exist_ok=True)
        progress(f"{target.name}: {done.tried / done.seconds:.0f} inputs/s")
        yield Outcome(
            fault=f"bad input: {target.name}",
            tried=done.tried,
            message="read, or one line",
            broken=tuple(f"{kind}: {kept / path.name}" for kind, path in done.faults),
        )
