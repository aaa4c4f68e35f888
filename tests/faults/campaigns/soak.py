"""A long run with evaluations and saves: its resources must not grow, and its steps must not become slower."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from scipy.stats import theilslopes

from benchmarks.measuring.report import progress
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import Launch, flags, read_metrics
from tests.faults.campaign import Outcome, Settings

ITERATIONS, QUICK_ITERATIONS = 5000, 600
SAMPLES = 200
"""Samples of a whole run, about."""

WARM_UP = 0.3
"""Part of a run in which caches fill. It is left out."""

MOST_GROWTH = 0.5
"""Growth in 1,000 iterations that counts as none: of MB that no other process shares, handles, threads and files."""

MOST_SLOWER = 0.05
"""Part by which the second half of the steps may be slower than the first, on a machine that does nothing else."""


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
    samples: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    next_iteration = iterations // SAMPLES
    while run.running:
        time.sleep(0.5)
        iteration = _iterations(metrics)
        if iteration >= next_iteration:
            for name, number in run.processes().items():
                if name.startswith("rank "):
                    with suppress(psutil.Error):
                        samples[int(name[5:])].append(_sample(psutil.Process(number), iteration))
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
        yield _growth(rank, [sample for sample in found if sample["iteration"] > WARM_UP * iterations])
    yield _steps([each["iteration_time_s"] * 1000 for each in read_metrics(metrics)[0]])


def _growth(rank: int, samples: Sequence[dict[str, float]]) -> Outcome:
    """Outcome for one rank: how much each of its resources grew in 1,000 iterations."""
    iterations = [each["iteration"] for each in samples]
    resources = [name for name in samples[-1] if name != "iteration"]
    grown = {name: 1000 * theilslopes([each[name] for each in samples], iterations)[0] for name in resources}
    return Outcome(
        fault=f"rank {rank}: growth in 1,000 iterations, {len(samples)} samples",
        tried=1,
        message=", ".join(f"{name} {grown[name]:+.2f} (at the end {samples[-1][name]:.0f})" for name in resources),
        broken=tuple(f"{name} grows" for name in resources if grown[name] > MOST_GROWTH),
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


def _sample(process: psutil.Process, iteration: int) -> dict[str, float]:
    return {
        "iteration": iteration,
        "memory_mb": process.memory_full_info().uss / 1e6,
        "handles": process.num_fds(),
        "threads": process.num_threads(),
        "shared_files": len(_shared_files()),
    }


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _iterations(metrics: Path) -> int:
    """Iterations reported so far; evaluations have lines of their own."""
    return len(read_metrics(metrics)[0]) if metrics.exists() else 0
