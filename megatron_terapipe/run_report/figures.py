"""Figures of a run at a glance."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from statistics import fmean, median, quantiles

from megatron_terapipe.run_report.run import TrainingRun
from megatron_terapipe.training.records.metrics import IterationMetrics

LAST = 10
"""Iterations whose losses are averaged for the loss at the end."""

SPREADS, LEAST_RATIO = 7.0, 1.3
"""Spreads above the median, and parts of the median, from which on an iteration is slow."""

SPREAD_OF_NORMAL = 1.4826
"""Standard deviation over median absolute deviation of normal values (Rousseeuw and Croux 1993, equation 1.2)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Some measurements."""

    median: float
    """The middle one."""
    low: float
    """A twentieth of them are below."""
    high: float
    """A twentieth of them are above."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return that of some values, at least one."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        twentieths = quantiles(values, n=20, method="inclusive")
        return cls(median(values), twentieths[0], twentieths[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a run."""

    iterations: int
    """Iterations done, each counted once."""
    planned: int | None
    """The last iteration that was planned; None if the file does not say."""
    tokens: int | None
    """Tokens trained on; None if the length of sequences is not known."""
    loss: float | None
    """Mean training loss of the last iterations; None if they are no numbers."""
    validation_loss: float | None
    """Of the last evaluation; None if there was none."""
    best_validation_loss: tuple[float, int] | None
    """The least of all evaluations, and its iteration."""
    iteration_time_s: Spread
    """Seconds of an iteration."""
    tokens_per_s: Spread
    """Tokens trained on in a second."""
    tflops_per_device: float
    """Model FLOPs in a second and device, in 10^12."""
    mfu: float | None
    """Share of the devices' peak; None where that is unknown."""
    peak_memory_bytes: tuple[int, ...]
    """Most that a rank of each stage held; empty if it was not measured."""
    skipped: int
    """Iterations whose update was skipped."""
    repeated: int
    """Iterations that were done again after a restart."""
    starts: int
    """Times that the run was started."""
    in_iterations_s: float
    """Seconds in iterations, also in those that were done again."""
    wall_s: float | None
    """Seconds from the first start to the last event, breaks between pieces included; None if unknown."""


def figures_of(run: TrainingRun) -> Figures:
    """Return the figures of a run."""
    every, steady, start = run.iterations, run.steady, run.start
    losses = [each.lm_loss for each in every[-LAST:] if isfinite(each.lm_loss)]
    evaluations = [each for each in run.evaluations() if isfinite(each.lm_loss)]
    best = min(evaluations, key=lambda each: each.lm_loss, default=None)
    shares = [each.mfu for each in steady if each.mfu is not None]
    seq_length = None if start is None else start.model.get("seq_length")
    return Figures(
        iterations=every[-1].iteration,
        planned=None if start is None else start.train_iters,
        tokens=None if not isinstance(seq_length, int) else every[-1].consumed_samples * seq_length,
        loss=fmean(losses) if losses else None,
        validation_loss=evaluations[-1].lm_loss if evaluations else None,
        best_validation_loss=None if best is None else (best.lm_loss, best.iteration),
        iteration_time_s=Spread.of([each.iteration_time_s for each in steady]),
        tokens_per_s=Spread.of([each.tokens_per_second for each in steady]),
        tflops_per_device=median(each.tflops_per_device for each in steady),
        mfu=median(shares) if shares else None,
        peak_memory_bytes=peak_memory(run),
        skipped=sum(each.skipped for each in every),
        repeated=run.num_repeated,
        starts=len(run.pieces),
        in_iterations_s=sum(each.iteration_time_s for piece in run.pieces for each in piece.iterations),
        wall_s=_wall_time(run),
    )


def peak_memory(run: TrainingRun) -> tuple[int, ...]:
    """Return the most that a rank of each stage ever held, in the last piece in which it was measured."""
    for piece in reversed(run.pieces):
        measured = [each.peak_memory_bytes for each in piece.iterations if each.peak_memory_bytes]
        if measured:
            return tuple(max(of_stage) for of_stage in zip(*measured, strict=False))
    return ()


def slow_iterations(run: TrainingRun) -> list[IterationMetrics]:
    """Return the iterations that took far longer than others of their batch size, the first ones of pieces left out."""
    bounds = {size: slow_from(times) for size, times in _times_by_batch_size(run.steady).items()}
    return [each for each in run.steady if each.iteration_time_s > bounds.get(each.global_batch_size, float("inf"))]


def slow_from(times: Sequence[float]) -> float:
    """Return the seconds above which an iteration is slow among others."""
    middle = median(times)
    spread = SPREAD_OF_NORMAL * median(abs(time - middle) for time in times)
    return max(middle + SPREADS * spread, LEAST_RATIO * middle)


def first_iterations(run: TrainingRun) -> list[tuple[float, float]]:
    """Return the iterations from each start that are no part of the figures, as ranges."""
    steady = {each.iteration for each in run.steady}
    ranges = []
    for _, iterations in run.counted:
        left_out = [each.iteration for each in iterations[:5] if each.iteration not in steady]
        if left_out:
            ranges.append((left_out[0] - 0.5, left_out[-1] + 0.5))
    return ranges


def _times_by_batch_size(iterations: Sequence[IterationMetrics]) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {}
    for each in iterations:
        if not isnan(each.iteration_time_s):
            times.setdefault(each.global_batch_size, []).append(each.iteration_time_s)
    return times


def _wall_time(run: TrainingRun) -> float | None:
    times = [
        event.time
        for piece in run.pieces
        for event in (piece.start, *piece.saves, *piece.notes, piece.end)
        if event is not None
    ]
    return max(times) - min(times) if times else None
