"""Faults of data: found before training, in mid-run, and while a dataset is written."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np

from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, data_file, index_file
from megatron_terapipe.errors import DataError
from tests.end_to_end.launching import Launch, environment, error_lines, flags, num_metrics
from tests.faults.campaign import Outcome, Settings

PROMISED_S = 60.0
"""Seconds from a fault in mid-run to the end of the last process."""

_ITERATIONS = 4000
_DOCUMENTS = 300


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield the outcome of each fault."""
    for fault in BEFORE:
        yield _refused(fault, settings.folder / "before")
    for fault in DURING[:1] if settings.quick else DURING:
        yield _ended(fault, settings.folder / "during")
    yield _read_though_removed(settings.folder / "removed")
    yield _one_cache(settings.folder / "shared")
    yield _preprocess_killed(settings.folder / "killed", 4 if settings.quick else 40, Random(settings.seed))


@dataclass(frozen=True)
class Fault:
    """Something done to a dataset."""

    name: str
    make: Callable[[Path], object]
    """Does it to the dataset of a prefix."""
    said: str
    """Part of the line that a user reads; `PREFIX` stands for the prefix."""
    flags: tuple[str, ...] = ()


def _overwrite(byte: int, value: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(byte)
            file.write(value)

    return make


def _of_index(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda prefix: change(index_file(prefix))


def _of_data(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda prefix: change(data_file(prefix))


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def _longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 2)


def _put_another_index(prefix: Path) -> None:
    other = _dataset(prefix.with_name("other"), length=90)
    index_file(other).replace(index_file(prefix))


def _empty(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, 257):
        pass


BEFORE = (
    Fault("bin shorter than its idx says", _of_data(_shorter), "PREFIX.bin is truncated: "),
    Fault("bin longer than its idx says", _of_data(_longer), "PREFIX.bin is not of its index: "),
    Fault("idx cut short", _of_index(_shorter), "PREFIX.idx is truncated: "),
    Fault("idx of another bin", _put_another_index, "PREFIX.bin is not of its index: "),
    Fault("idx of another version", _of_index(_overwrite(9, b"\2")), "PREFIX.idx has format version 2"),
    Fault("idx of another type", _of_index(_overwrite(17, b"\7")), "PREFIX.idx has token type code 7"),
    Fault("a negative length", _of_index(_overwrite(38, b"\xff" * 4)), "PREFIX.idx is damaged at byte 38: sequence 1 "),
    Fault(
        "an offset out of order",
        _of_index(_overwrite(34 + 4 * _DOCUMENTS + 16, struct.pack("<q", 2))),
        f"PREFIX.idx is damaged at byte {34 + 4 * _DOCUMENTS + 16}: sequence 2 begins at byte 2 of ",
    ),
    Fault(
        "an offset beyond the file",
        _of_index(_overwrite(34 + 4 * _DOCUMENTS + 16, struct.pack("<q", 2**60))),
        f"PREFIX.idx is damaged at byte {34 + 4 * _DOCUMENTS + 16}: sequence 2 begins at byte {2**60} of ",
    ),
    Fault(
        "document bounds out of order",
        _of_index(_overwrite(34 + 12 * _DOCUMENTS + 16, struct.pack("<q", 0))),
        f"PREFIX.idx is damaged at byte {34 + 12 * _DOCUMENTS + 16}: document bound 2 is 0, ",
    ),
    Fault(
        "a token id beyond the vocabulary",
        _of_data(_overwrite(600, struct.pack("<H", 300))),
        "PREFIX.bin has the token id 300 at byte 600, ",
    ),
    Fault("no document", _empty, "leaves no document of the 0 in PREFIX"),
    Fault("no document for validation", lambda _: None, "leaves no document of the 300", ("--split", "1,1e-9")),
    Fault("no file", lambda prefix: data_file(prefix).unlink(), "no indexed dataset at PREFIX: PREFIX.bin not found"),
)

DURING = (
    Fault("bin cut short in mid-run", _of_data(lambda path: os.truncate(path, 100)), "PREFIX.bin ends at byte 100 now"),
    Fault(
        "idx cut short in mid-run", _of_index(lambda path: os.truncate(path, 100)), "PREFIX.idx ends at byte 100 now"
    ),
    Fault(
        "cached order cut short in mid-run",
        lambda prefix: [os.truncate(path, 150) for path in (prefix.parent / "index_cache").glob("*.npy")],
        "/index_cache/",
    ),
    Fault(
        "token ids beyond the vocabulary written in mid-run",
        _of_data(_overwrite(0, b"\xff\xff" * 100 * _DOCUMENTS)),
        "PREFIX.bin has the token id 65535 at byte ",
    ),
)


def _dataset(prefix: Path, length: int = 100) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(length)
    with IndexedDatasetWriter(prefix, 257) as writer:
        for _ in range(_DOCUMENTS):
            writer.add_document(random.integers(0, 256, length))
    return prefix


def _refused(fault: Fault, folder: Path) -> Outcome:
    """Start the trainer in this process on a dataset with a fault."""
    import pretrain_gpt

    shutil.rmtree(folder, ignore_errors=True)
    prefix = _dataset(folder / "c")
    fault.make(prefix)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    with patch.dict(os.environ, ranks), redirect_stderr(io.StringIO()) as errors:
        code = pretrain_gpt.main(flags(prefix, *fault.flags))
    lines = error_lines(errors.getvalue())
    broken = [] if code == 2 else [f"exit code {code}"]
    return _judged(fault, prefix, lines[:2], broken)


def _ended(fault: Fault, folder: Path) -> Outcome:
    """Make a fault while two ranks train."""
    shutil.rmtree(folder, ignore_errors=True)
    prefix = _dataset(folder / "c")
    run = _training(folder, prefix, _ITERATIONS)
    run.wait_for(lambda: _iterations(folder) > 5)
    fault.make(prefix)
    began = time.monotonic()
    code = run.wait()
    took = time.monotonic() - began
    broken = [] if code not in (0, None) else ["exit code 0"]
    if run.survivors():
        broken.append(f"left {len(run.survivors())} processes")
    lines = error_lines(run.output())
    if not all(line.startswith("error: rank ") for line in lines):
        broken.append("a line names no rank")
    outcome = _judged(fault, prefix, lines, broken)
    return Outcome(**vars(outcome) | {"longest_s": took, "promised_s": PROMISED_S})


def _judged(fault: Fault, prefix: Path, lines: list[str], broken: list[str]) -> Outcome:
    said = lines[0] if lines else ""
    if fault.said.replace("PREFIX", str(prefix)) not in said:
        broken.append(f"it said {said!r}")
    if not lines:
        broken.append("no line")
    return Outcome(fault=fault.name, tried=1, said=said.replace(f"{prefix.parent}/", ""), broken=tuple(broken))


def _read_though_removed(folder: Path) -> Outcome:
    """Remove all files of the data while two ranks train on them."""
    prefix = _dataset(folder / "c")
    iterations = 40
    run = _training(folder, prefix, iterations)
    run.wait_for(lambda: _iterations(folder) > 5)
    for path in (data_file(prefix), index_file(prefix)):
        path.unlink()
    shutil.rmtree(folder / "index_cache")
    code = run.wait()
    broken = [] if (code, _iterations(folder)) == (0, iterations) else [f"exit code {code}"]
    return Outcome(fault="all files of the data removed in mid-run", tried=1, said="goes on", broken=tuple(broken))


def _one_cache(folder: Path) -> Outcome:
    """Start two runs at once that fill one cache."""
    prefix = _dataset(folder / "c")
    runs = [_training(folder / name, prefix, 3) for name in ("one", "other")]
    codes = [run.wait() for run in runs]
    losses = [(folder / name / "m.jsonl").read_text().count('"lm_loss"') for name in ("one", "other")]
    broken = [] if codes == [0, 0] and losses == [3, 3] else [f"exit codes {codes}"]
    return Outcome(fault="two runs fill one cache", tried=1, said="both train", broken=tuple(broken))


def _preprocess_killed(folder: Path, times: int, random: Random) -> Outcome:
    """Kill the command that writes datasets; what it leaves is no dataset, or a whole one."""
    folder.mkdir(parents=True)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(60_000)))
    words = [sys.executable, "-m", "megatron_terapipe.data.preprocess", "--input", str(corpus)]
    words += ["--output-prefix", str(folder / "c")]
    prefix = folder / "c_text_document"
    began = time.monotonic()
    subprocess.run(words, check=True, env=environment(), capture_output=True)
    whole_s, size = time.monotonic() - began, len(IndexedDataset(prefix))
    broken = []
    for _ in range(times):
        for path in folder.glob("c_*"):
            path.unlink()
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0, 1.1 * whole_s))
        process.kill()
        process.wait()
        try:
            if len(IndexedDataset(prefix)) != size:
                broken.append("half a dataset looks whole")
        except DataError:
            pass
    return Outcome(
        fault="kill -9 of preprocess at any moment",
        tried=times,
        said="no dataset, or a whole one",
        broken=tuple(broken),
    )


def _training(folder: Path, prefix: Path, iterations: int) -> Launch:
    more = ("--train-iters", iterations, "--eval-iters", 0, "--metrics-file", "m.jsonl")
    return Launch(folder, flags(prefix, *more))


def _iterations(folder: Path) -> int:
    return num_metrics(folder / "m.jsonl")
