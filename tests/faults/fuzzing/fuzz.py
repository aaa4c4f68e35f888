"""The campaign of fuzzing: many inputs on each parser, in processes that may hang or die.

A process writes into its folder: `current`, the input that it tries; `tried`, how many it has tried; `faults/`, the
first input of each kind of fault with a description.
"""

import hashlib
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

from benchmarks.measuring.report import progress
from tests.faults.campaign import Outcome, Settings
from tests.faults.fuzzing.edits import random_input, words_of
from tests.faults.fuzzing.limits import limit_memory
from tests.faults.fuzzing.target import Target, fault_of
from tests.faults.fuzzing.targets import target, targets

INPUTS, QUICK_INPUTS = 100_000, 2_000
"""Inputs for each parser."""

KEPT = Path("runs/faults/inputs")
"""Folder for the inputs that broke a promise. They belong to the `found` of their target after the fix."""

MEMORY = 1 << 30
"""Bytes that a parser may take."""

_EVERY = 50
"""Inputs between two notes of how many there were."""

_START_S = 180.0
"""Time for a process to start."""

_DEATHS = 5
"""Processes that may die on one parser before its other inputs are left out."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each parser."""
    for each in targets():
        folder = settings.folder / each.name.replace(" ", "-")
        done = fuzz(each, folder, QUICK_INPUTS if settings.quick else INPUTS, settings.seed + 1)
        kept = KEPT / folder.name
        if done.faults:
            shutil.copytree(folder / "faults", kept, dirs_exist_ok=True)
        progress(f"{each.name}: {done.tried / done.seconds:.0f} inputs/s")
        yield Outcome(
            fault=f"bad input: {each.name}",
            tried=done.tried,
            message="read, or one line",
            broken=tuple(f"{kind}: {kept / path.name}" for kind, path in done.faults),
        )


@dataclass(frozen=True)
class Fuzzed:
    """Result of many inputs of a parser."""

    tried: int
    seconds: float
    """Time that they took, the start of processes included."""
    faults: tuple[tuple[str, Path], ...]
    """Kind of each fault, and the file with the input that made it."""


def fuzz(parser: Target, folder: Path, inputs: int, seed: int) -> Fuzzed:
    """Try inputs on a parser; a process that dies or hangs is followed by another."""
    start = time.monotonic()
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    tried = deaths = 0
    while tried < inputs and deaths < _DEATHS:
        number, died = _in_a_process(parser, folder.resolve(), inputs - tried, seed + deaths)
        tried += number
        if died is None:
            break
        held = (folder / "current").read_bytes()
        _write_fault(folder, held[8 : 8 + int.from_bytes(held[:8], "big")], died, f"seed {seed + deaths}")
        deaths += 1
    texts = sorted((folder / "faults").glob("*.txt"))
    faults = tuple((text.read_text().splitlines()[0], text.with_suffix(".input")) for text in texts)
    return Fuzzed(tried, time.monotonic() - start, faults)


def _in_a_process(parser: Target, folder: Path, inputs: int, seed: int) -> tuple[int, str | None]:
    """Return how many inputs a process tried, and how it died; None if it did not."""
    for name in ("tried", "current"):
        (folder / name).unlink(missing_ok=True)
    child = multiprocessing.get_context("spawn").Process(target=try_inputs, args=(parser.name, folder, inputs, seed))
    child.start()
    try:
        hung = _hangs(child, folder / "current", patience_s=60 * parser.seconds)
    finally:
        child.kill()
        child.join()
    tried = int((folder / "tried").read_text() or 0) if (folder / "tried").exists() else 0
    if hung:
        return tried, "hangs, and is deaf to signals"
    if child.exitcode:
        last = (folder / "output").read_text(errors="replace").splitlines()[-1:] or [""]
        return tried, f"the process dies with exit code {child.exitcode}: {last[0][:200]}"
    return tried, None


def _hangs(child: BaseProcess, current: Path, patience_s: float) -> bool:
    """Wait for the end of a process, and return whether it hangs instead."""
    seen, since = 0.0, time.monotonic()
    while child.is_alive():
        changed = current.stat().st_mtime if current.exists() else 0.0
        if changed != seen:
            seen, since = changed, time.monotonic()
        if time.monotonic() - since > (patience_s if seen else _START_S):
            return True
        time.sleep(0.1)
    return False


def try_inputs(name: str, folder: Path, inputs: int, seed: int) -> None:
    """Try inputs on a parser, under its limits."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True
    parser, scratch = target(name), folder / "scratch"
    scratch.mkdir(exist_ok=True)
    os.chdir(scratch)
    for data in parser.seeds:  # What is loaded but once is loaded now, without a limit.
        parser.read(data, scratch)
    limit_memory(MEMORY)
    words, random, kinds = (*words_of(parser.seeds), *parser.words), Random(seed), set()
    current = os.open(folder / "current", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in range(1, inputs + 1):
        data = random_input(random, parser.seeds, words)
        # Before it is tried: if this process dies of it, its parent finds the input here.
        os.pwrite(current, len(data).to_bytes(8, "big") + data, 0)
        fault = fault_of(parser, data, scratch)
        if fault is not None and fault.kind not in kinds:
            kinds.add(fault.kind)
            _write_fault(folder, data, fault.kind, fault.detail)
        if number % _EVERY == 0 or number == inputs:
            (folder / "tried").write_text(str(number))


def _write_fault(folder: Path, data: bytes, kind: str, detail: str) -> None:
    """Keep an input that broke a promise."""
    name = hashlib.sha256(kind.encode()).hexdigest()[:12]
    (folder / "faults" / f"{name}.input").write_bytes(data)
    (folder / "faults" / f"{name}.txt").write_text(f"{kind}\n{detail}\n", encoding="utf-8", errors="backslashreplace")
