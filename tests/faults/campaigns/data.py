"""Faults of data during a run. Those of before a run are in tests/data/test_indexed_dataset.py."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter, data_file, index_file
from tests.end_to_end.launching import Launch, flags, num_metrics
from tests.faults.campaign import Outcome, Settings, ending

_ITERATIONS = 4000
_DOCUMENTS = 1 << 16  # The order of fewer is not stored.


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield the outcome of each fault."""
    for fault in DURING[:1] if settings.quick else DURING:
        yield _ended(fault, settings.folder / "during")
    yield _read_though_removed(settings.folder / "removed")
    yield _one_cache(settings.folder / "shared")


@dataclass(frozen=True)
class Fault:
    """Something done to a dataset."""

    name: str
    make: Callable[[Path], object]
    """Does it to the dataset of a prefix."""
    message: str
    """Part of the line that a user reads; `PREFIX` is replaced by the prefix."""
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


def _ended(fault: Fault, folder: Path) -> Outcome:
    """Make a fault while two ranks train."""
    shutil.rmtree(folder, ignore_errors=True)
    prefix = _dataset(folder / "c")
    run = _training(folder, prefix, _ITERATIONS)
    run.wait_for(lambda: _iterations(folder) > 5)
    fault.make(prefix)
    end = ending(run)
    message = fault.message.replace("PREFIX", str(prefix))
    broken = [f"it does not say {message!r}"] * (not any(message in line for line in end.lines))
    broken += ["a line names no rank"] * (not all(line.startswith("error: rank ") for line in end.lines))
    # Ranks that read the same bytes report them each.
    outcome = end.outcome(fault.name, code=None, lines=end.lines[:1], broken=broken)
    return replace(outcome, message=outcome.message.replace(f"{prefix.parent}/", ""))


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
    return Outcome(fault="all files of the data removed in mid-run", tried=1, message="continues", broken=tuple(broken))


def _one_cache(folder: Path) -> Outcome:
    """Start two runs at once that fill one cache."""
    prefix = _dataset(folder / "c")
    runs = [_training(folder / name, prefix, 3) for name in ("one", "other")]
    codes = [run.wait() for run in runs]
    losses = [(folder / name / "m.jsonl").read_text().count('"lm_loss"') for name in ("one", "other")]
    broken = [] if codes == [0, 0] and losses == [3, 3] else [f"exit codes {codes}"]
    return Outcome(fault="two runs fill one cache", tried=1, message="both train", broken=tuple(broken))


def _training(folder: Path, prefix: Path, iterations: int) -> Launch:
    more = ("--train-iters", iterations, "--eval-iters", 0, "--metrics-file", "m.jsonl")
    return Launch(folder, flags(prefix, *more))


def _iterations(folder: Path) -> int:
    return num_metrics(folder / "m.jsonl")
