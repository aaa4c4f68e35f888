"""What came beside what the search promised: each figure, the difference, and its cause where that is known."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepspeed_ext.plan.measured.gaps import RankTime
from megatron_terapipe.run_report.figures import Figures
from megatron_terapipe.run_report.promise import Promise
from megatron_terapipe.run_report.steps import MeasuredSteps
from megatron_terapipe.search.report.figures import bytes_text, time_text
from megatron_terapipe.training.records.events import RunStart

COMPUTE = ("compute_s", "tensor_parallel_s", "head_exchange_s")
"""Parts of a predicted iteration that are inside its ops."""

BUBBLE_POINTS = 0.03
"""Difference of bubble ratios from which on op times are told to be others."""

ON_CPU = "a CPU counts the whole process with its libraries, a device the tensors alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A figure that was promised, and what came."""

    name: str
    """Of the figure."""
    unit: Literal["s", "bytes", "tokens/s", "share"]
    """Of both: `s`, `bytes`, `tokens/s` or `share`."""
    promised: float
    """What was predicted."""
    came: float
    """What was measured."""
    why: str = ""
    """The cause of the difference, as far as it is known; empty = unknown."""

    @property
    def difference(self) -> float:
        """What came relative to what was promised, less 1; of shares, the points between them."""
        if self.unit == "share":
            return self.came - self.promised
        return self.came / self.promised - 1 if self.promised else 0.0

    def text(self, value: float) -> str:
        """Return one of the two figures as text."""
        if self.unit == "s":
            return time_text(value)
        if self.unit == "bytes":
            return bytes_text(value)
        return f"{value:.1%}" if self.unit == "share" else f"{value:,.0f}"

    @property
    def difference_text(self) -> str:
        """The difference as text."""
        return f"{100 * self.difference:+.1f} points" if self.unit == "share" else f"{self.difference:+.1%}"


def kept(promise: Promise, figures: Figures, steps: MeasuredSteps | None, start: RunStart | None) -> list[Kept]:
    """Return the figures that were promised, each beside what came.

    Args:
        steps: its measured timeline, if there is one.
        start: how it started, if the file says so.
    """
    predicted = promise.predicted
    middle = figures.iteration_time_s.median
    found = [
        Kept(
            name="iteration",
            unit="s",
            promised=predicted.iteration_time_s,
            came=middle,
            why="; ".join(_why_time(promise, middle, steps)),
        ),
        Kept(
            name="tokens a second",
            unit="tokens/s",
            promised=predicted.tokens_per_s,
            came=figures.tokens_per_s.median,
            why="follows from the time of an iteration",
        ),
    ]
    if predicted.mfu is not None and figures.mfu is not None:
        found.append(Kept(name="MFU", unit="share", promised=predicted.mfu, came=figures.mfu, why="as above"))
    if steps is not None:
        why = "; ".join(_why_bubble(steps, predicted.bubble_ratio))
        found.append(
            Kept(name="bubble ratio", unit="share", promised=predicted.bubble_ratio, came=steps.measured, why=why)
        )
    of_process = start is not None and start.machine.device == "cpu"
    for rank, (memory, came) in enumerate(zip(predicted.memory_per_rank, figures.peak_memory_bytes, strict=False)):
        why = ON_CPU if of_process else ""
        found.append(Kept(name=f"memory, stage {rank}", unit="bytes", promised=memory["total"], came=came, why=why))
    return found


def _why_time(promise: Promise, seconds: float, steps: MeasuredSteps | None) -> Iterator[str]:
    interval = promise.predicted.interval_s
    if interval is not None:
        low, high = interval
        share = f"{promise.predicted.interval_coverage:.0%}"
        if low <= seconds <= high:
            yield f"within {time_text(low)} to {time_text(high)}, where {share} of runs were expected"
        else:
            yield f"outside {time_text(low)} to {time_text(high)}, where {share} of runs were expected"
    if promise.differences:
        yield "what ran may not be what was priced (see above)"
    if steps is not None:
        spent = max(steps.comparison.rank_times, key=lambda each: each.busy)
        parts = promise.predicted.breakdown
        compute = sum(parts[name] for name in COMPUTE)
        yield f"ops of the busiest rank took {time_text(spent.busy)}, {time_text(compute)} were promised"


def _why_bubble(steps: MeasuredSteps, promised: float) -> Iterator[str]:
    simulated = steps.simulated.bubble_ratio
    yield f"the same order with the measured op times has {simulated:.1%}; the rest are transfers and the host"
    if abs(simulated - promised) > BUBBLE_POINTS:
        yield "so the times of ops are in other proportions than was promised"
    ops = steps.comparison.mean_times()
    spans = [span.end - span.start for row in steps.comparison.measured.spans for span in row]
    if ops and min(spans, default=1.0) < 1e-3:
        yield f"ops are as short as {time_text(min(spans))}, so a wait of the host weighs much"


def time_by_rank(steps: MeasuredSteps) -> list[RankTime]:
    """Return on what each rank spent the measured step, in seconds."""
    return steps.comparison.rank_times
