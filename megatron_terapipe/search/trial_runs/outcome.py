"""What came of a run, read from what it left behind."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

WARM_UP_ITERATIONS = 3
"""Iterations that are slower than the rest: the first makes the optimizer's state, the next ones the allocator's."""

MEMORY_WORDS = ("out of memory", "outofmemory", "can't allocate memory", "cannot allocate memory")
"""What CUDA, torch's allocators and the operating system say, in small letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        iteration_time_s: median of the iterations behind the warm-up; None = it failed.
        peak_memory_bytes: of the fullest rank; None = it did not get so far.
        out_of_memory: whether memory ran out.
        reason: why it failed, in one line; None if it did not.
    """

    iteration_time_s: float | None
    peak_memory_bytes: float | None = None
    out_of_memory: bool = False
    reason: str | None = None


def outcome_of(exit_code: int, output: str, metrics: Path, *, iterations: int) -> Outcome:
    """Read the outcome of a run. One that has done all its iterations is measured, however it ended.

    Args:
        exit_code: of the launcher; below 0 the signal that ended it.
        output: of launcher and ranks together.
        metrics: the trainer's metrics file, which need not be there.
        iterations: that it was to do.
    """
    times, peaks = read_metrics(metrics)
    peak = max(peaks, default=None)
    if times and (exit_code == 0 or len(times) >= iterations):
        return Outcome(iteration_time_s=median(steady(times)), peak_memory_bytes=peak)
    return Outcome(
        iteration_time_s=None,
        peak_memory_bytes=peak,
        out_of_memory=ran_out_of_memory(exit_code, output),
        reason=failure(exit_code, output),
    )


def steady(times: Sequence[float]) -> Sequence[float]:
    """The iterations behind the warm-up; of a short run, its later half."""
    return times[min(WARM_UP_ITERATIONS, len(times) // 2) :]


def read_metrics(path: Path) -> tuple[list[float], list[float]]:
    """Seconds of each iteration, and peak bytes where they were measured, of a metrics file."""
    times, peaks = [], []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue  # The run died while it wrote.
            if "iteration_time_s" in values:
                times.append(float(values["iteration_time_s"]))
                peaks += [float(peak) for peak in values.get("peak_memory_bytes") or ()]
    return times, peaks


def ran_out_of_memory(exit_code: int, output: str) -> bool:
    """Whether a failed run ended for want of memory: it says so, or the operating system killed a rank."""
    lowered = output.lower()
    killed = exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "return code = -9" in lowered
    return killed or any(words in lowered for words in MEMORY_WORDS)


def failure(exit_code: int, output: str) -> str:
    """Why a run failed: our own line, or the last line of a traceback, or the exit code."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raised = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and " " in line]
    # Behind a launcher's prefix, such as [rank0]:
    said = ours or raised or [f"it ended with exit code {exit_code}"]
    return said[-1][:300]
