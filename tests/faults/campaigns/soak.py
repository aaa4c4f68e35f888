"""A long run with evaluations and saves: its resources must not grow, and its steps must not become slower."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measuring.report import progress
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import PRETRAIN, Launch, flags, read_metrics
from tests.faults.campaign import Outcome, Settings, slope

ITERATIONS, QUICK_ITERATIONS = 5000, 600
SAMPLES = 200
"""Samples of a whole run, about."""

WARM_UP = 0.3
"""Part of a run in which caches fill. It is left out."""

MOST_GROWTH = {"memory_mb": 0.5, "handles": 0.5, "threads": 0.5, "shared_files": 0.5}
"""Growth in 1,000 iterations that counts as none, by field of `Sample`."""

MOST_SLOWER = 0.05
"""Part by which the second half of the steps may be slower than the first, on a machine that does nothing else."""


@dataclass(frozen=True)
class Sample:
    """Resources of one rank at one moment."""

    iteration: int
    """Last iteration that was reported."""
    memory_mb: float
    """Memory that no other process shares, MB."""
    handles: int
    """Open files, sockets and pipes."""
    threads: int
    shared_files: int
    """Files in /dev/shm, of all programs that run."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """One long run on two ranks, with the growth of each rank's memory, handles and threads, and of its steps."""
    iterations = QUICK_ITERATIONS if settings.quick else ITERATIONS
    metrics = settings.folder / "metrics.jsonl"
    interval = iterations // 20
    saves = ["--save", "checkpoints", "--save-interval", interval, "--keep-last-n-checkpoints", 2]
    evaluations = ["--eval-interval", interval, "--eval-iters", 4, "--metrics-file", metrics.name]
    data = write_corpus(settings.folder)
    before = _shared_files()
    run = Launch(settings.folder, flags(data, "--train-iters", iterations, *saves, *evaluations))
    samples: dict[int, list[Sample]] = {0: [], 1: []}
    next_iteration = iterations // SAMPLES
    while run.running:
        time.sleep(0.5)
        iteration = _iterations(metrics)
        if iteration >= next_iteration:
            for rank, process in _ranks(run).items():
                with suppress(psutil.Error):
                    samples[rank].append(_sample(process, iteration))
            progress(f"iteration {iteration} of {iterations}")
            next_iteration = iteration + iterations // SAMPLES
    code = run.wait()
    if code:
        yield Outcome(fault="a long run", tried=1, broken=(f"exit code {code}",), message=run.output().splitlines()[-1])
        return
    left = sorted(_shared_files() - before)
    broken = (f"{len(left)} files left in /dev/shm, such as {left[0]}",) if left else ()
    yield Outcome(
        fault=f"{iterations} iterations: remaining files", tried=1, message="nothing" * (not left), broken=broken
    )
    for rank, found in samples.items():
        yield _growth(rank, [sample for sample in found if sample.iteration > WARM_UP * iterations])
    yield _steps([each["iteration_time_s"] * 1000 for each in read_metrics(metrics)[0]])


def _growth(rank: int, samples: Sequence[Sample]) -> Outcome:
    """Outcome for one rank: how much each of its resources grew in 1,000 iterations."""
    per_sample = (samples[-1].iteration - samples[0].iteration) / (len(samples) - 1)
    grown = {name: slope([getattr(each, name) for each in samples]) / per_sample * 1000 for name in MOST_GROWTH}
    return Outcome(
        fault=f"rank {rank}: growth in 1,000 iterations, {len(samples)} samples",
        tried=1,
        message=", ".join(
            f"{name} {value:+.2f} (at the end {getattr(samples[-1], name):.0f})" for name, value in grown.items()
        ),
        broken=tuple(f"{name} grows" for name, value in grown.items() if value > MOST_GROWTH[name]),
    )


def _steps(times_ms: Sequence[float]) -> Outcome:
    """Outcome for the time of a step: its median in the first half of the run and in the second."""
    half = len(times_ms) // 2
    first, second = statistics.median(times_ms[:half]), statistics.median(times_ms[half:])
    slower = second / first - 1
    return Outcome(
        fault="time of a step",
        tried=1,
        message=f"{first:.1f} ms in the first half, {second:.1f} ms in the second: {slower:+.1%}",
        broken=(f"slower by {slower:.1%}",) if slower > MOST_SLOWER else (),
    )


def _ranks(run: Launch) -> dict[int, psutil.Process]:
    """Processes of the ranks, by rank."""
    found = {}
    for number in run.survivors():
        with suppress(psutil.Error):
            process = psutil.Process(number)
            rank = process.environ().get("RANK")
            if rank is not None and str(PRETRAIN) in process.cmdline():
                found[int(rank)] = process
    return found


def _sample(process: psutil.Process, iteration: int) -> Sample:
    return Sample(
        iteration=iteration,
        memory_mb=process.memory_full_info().uss / 1e6,
        handles=process.num_fds(),
        threads=process.num_threads(),
        shared_files=len(_shared_files()),
    )


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _iterations(metrics: Path) -> int:
    """Iterations reported so far; evaluations have lines of their own."""
    return len(read_metrics(metrics)[0]) if metrics.exists() else 0
