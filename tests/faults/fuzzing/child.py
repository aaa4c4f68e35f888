"""One process that tries inputs on one parser, under its limits; `fuzz.py` starts it, and again where it dies.

    python -m tests.faults.fuzzing.child TARGET FOLDER --source edits --inputs 1000 --seed 1

It writes into FOLDER: `current`, the input that it tries; `tried`, how many it has; `faults/`, the first input of each
kind of fault with a description.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

SOURCES = ("edits", "coverage")
"""Sources of inputs: random edits, or atheris, which searches for inputs that reach new code."""

MEMORY = 1 << 30
"""Bytes that a parser may take."""

_EVERY = 50
"""Inputs between two notes of how many there were."""


class Tries:
    """Tries inputs and writes down faults.

    Args:
        judge: returns the fault of an input, as a kind and a detail; None without one.
    """

    def __init__(self, judge: Callable[[bytes], tuple[str, str] | None], folder: Path) -> None:
        self._judge, self._folder, self._tried = judge, folder, 0
        self._kinds: set[str] = set()
        (folder / "faults").mkdir(exist_ok=True)
        self._current = os.open(folder / "current", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        # Before it is tried: if this process dies of it, its parent finds the input here.
        os.pwrite(self._current, len(data).to_bytes(8, "big") + data, 0)
        found = self._judge(data)
        if found is not None and found[0] not in self._kinds:
            self._kinds.add(found[0])
            write_fault(self._folder, data, *found)
        self._tried += 1
        if self._tried % _EVERY == 0:
            self.note()

    def note(self) -> None:
        """Write down how many inputs were tried."""
        (self._folder / "tried").write_text(str(self._tried))


def write_fault(folder: Path, data: bytes, kind: str, detail: str) -> None:
    """Keep an input that broke a promise."""
    name = hashlib.sha256(kind.encode()).hexdigest()[:12]
    (folder / "faults" / f"{name}.input").write_bytes(data)
    (folder / "faults" / f"{name}.txt").write_text(f"{kind}\n{detail}\n", encoding="utf-8", errors="backslashreplace")


def read_current(folder: Path) -> bytes:
    """Return the input that a process tried last."""
    held = (folder / "current").read_bytes()
    return held[8 : 8 + int.from_bytes(held[:8], "big")]


def main() -> None:
    """Try inputs until there were enough."""
    parser = argparse.ArgumentParser(description="Try inputs on one parser.")
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", choices=SOURCES, default=SOURCES[0])
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    with _observed(options.source):
        from tests.faults.fuzzing.edits import random_input, words_of
        from tests.faults.fuzzing.limits import limit_memory
        from tests.faults.fuzzing.target import fault_of
        from tests.faults.fuzzing.targets import target

        subject = target(options.target)
        scratch = options.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        os.chdir(scratch)
        for seed in subject.seeds:  # What is loaded but once is loaded now, without a limit.
            subject.read(seed, scratch)
    limit_memory(MEMORY)
    words = (*words_of(subject.seeds), *subject.words)

    def judge(data: bytes) -> tuple[str, str] | None:
        fault = fault_of(subject, data, scratch)
        return None if fault is None else (fault.kind, fault.detail)

    tries = Tries(judge, options.folder)
    random = Random(options.seed)
    if options.source == "edits":
        for _ in range(options.inputs):
            tries(random_input(random, subject.seeds, words))
    else:
        _follow_coverage(tries, subject.seeds, words, options)
    tries.note()


@contextmanager
def _observed(source: str) -> Iterator[None]:
    """Let atheris see which lines of our code run, where it is the source; the code is imported in the body."""
    if source != "coverage":
        yield
        return
    import atheris

    with atheris.instrument_imports(include=["megatron_terapipe", "deepspeed_ext"]):
        yield


def _follow_coverage(
    tries: Tries, seeds: tuple[bytes, ...], words: tuple[bytes, ...], options: argparse.Namespace
) -> None:
    import atheris

    from tests.faults.fuzzing.edits import WORDS, Edit, mutated

    corpus = options.folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    left = options.inputs

    def once(data: bytes) -> None:
        nonlocal left
        tries(data)
        left -= 1
        if left <= 0:  # libFuzzer ends the process itself, without a word to Python.
            tries.note()
            os._exit(0)

    def change(data: bytes, longest: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, longest))
        choices = (*WORDS, *words)
        return mutated(data, [Edit.random(random, choices) for _ in range(random.randint(1, 3))], longest)

    quiet = ["-verbosity=0", "-print_final_stats=0", "-close_fd_mask=2", "-timeout=600", "-rss_limit_mb=0"]
    atheris.Setup(["fuzz", f"-seed={options.seed}", "-max_len=65536", *quiet, str(corpus)], once, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
