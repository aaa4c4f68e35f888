"""The charts of a report: which curves of runs are drawn, and what is marked in them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_terapipe.page.chart import Chart, Curve, Level
from megatron_terapipe.page.thinning import Point
from megatron_terapipe.run_report.figures import first_iterations, slow_from
from megatron_terapipe.run_report.promise import Promise
from megatron_terapipe.run_report.run import TrainingRun
from megatron_terapipe.training.records.metrics import IterationMetrics

Value = Callable[[IterationMetrics], float | None]

GIGABYTE = 1e9
CLIPPED_FROM = 3.0
"""Parts of the bound of slow iterations above which the chart of times ends."""


def charts(runs: Sequence[TrainingRun], promises: Sequence[Promise | None]) -> dict[str, Chart]:
    """Return the charts of some runs, by names for files; those of which nothing was recorded are left out.

    Args:
        promises: what the search promised of each.
    """
    restarts = [float(piece.first) for run in runs for piece in run.pieces[1:]]
    found = dict(_charts(runs, promises))
    return {
        name: replace(chart, marks=restarts) for name, chart in found.items() if any(c.points for c in chart.curves)
    }


def _charts(runs: Sequence[TrainingRun], promises: Sequence[Promise | None]) -> Iterator[tuple[str, Chart]]:
    single = len(runs) == 1
    promise = promises[0] if single else None
    predicted = None if promise is None else promise.predicted
    yield "loss", Chart(title="Loss", curves=list(_losses(runs)))
    low, high = (predicted.interval_s or (predicted.iteration_time_s,) * 2) if predicted else (0.0, 0.0)
    levels = [Level("promised", predicted.iteration_time_s, low, high)] if predicted else []
    yield (
        "iteration_time",
        Chart(
            title="Time of an iteration",
            unit="s",
            curves=_curves(runs, lambda each: each.iteration_time_s),
            levels=levels,
            shaded=first_iterations(runs[0]) if single else (),
            from_zero=True,
            top=_top(runs, high),
            note="shaded: first iterations after a start, no part of the figures" if single else "",
        ),
    )
    sequences = predicted.tokens_per_s if predicted else 0.0
    levels = [Level("promised", sequences, sequences, sequences)] if predicted else []
    tokens = _curves(runs, lambda each: each.tokens_per_second)
    yield "throughput", Chart(title="Tokens a second", curves=tokens, levels=levels, from_zero=True)
    mfu = _curves(runs, lambda each: None if each.mfu is None else 100 * each.mfu)
    yield "mfu", Chart(title="MFU", unit="%", curves=mfu, from_zero=True)
    yield "grad_norm", Chart(title="Norm of the gradient", curves=_curves(runs, _norm), logarithmic=True)
    yield "learning_rate", Chart(title="Learning rate", curves=_curves(runs, lambda each: each.learning_rate))
    scales = _curves(runs, lambda each: each.loss_scale)
    yield "loss_scale", Chart(title="Loss scale", curves=scales, logarithmic=True)
    if len({each.global_batch_size for run in runs for each in run.iterations}) > 1:
        sizes = _curves(runs, lambda each: float(each.global_batch_size))
        yield "batch_size", Chart(title="Global batch size", unit="sequences", curves=sizes, from_zero=True)
    yield (
        "memory",
        Chart(
            title="Peak memory so far" if single else "Peak memory of the fullest stage",
            unit="GB",
            curves=_memory_of_stages(runs[0]) if single else _curves(runs, _fullest),
            levels=_promised_memory(promise),
            from_zero=True,
        ),
    )


def _curves(runs: Sequence[TrainingRun], value: Value) -> list[Curve]:
    """A curve for each run, over the iterations that have the value."""
    names = [run.name if len(runs) > 1 else "" for run in runs]
    return [
        Curve(name, _points(run, value), number) for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]


def _points(run: TrainingRun, value: Value) -> list[Point]:
    found = ((float(each.iteration), value(each)) for each in run.iterations)
    return [(place, y) for place, y in found if y is not None]


def _losses(runs: Sequence[TrainingRun]) -> Iterator[Curve]:
    for number, run in enumerate(runs):
        single = len(runs) == 1
        yield Curve("training" if single else run.name, _points(run, lambda each: each.lm_loss), number)
        validation = [(float(each.iteration), each.lm_loss) for each in run.evaluations()]
        if validation:
            name = "validation" if single else f"{run.name}, validation"
            yield Curve(name, validation, number + len(runs), dotted=True)


def _norm(metrics: IterationMetrics) -> float | None:
    return metrics.grad_norm


def _fullest(metrics: IterationMetrics) -> float | None:
    return max(metrics.peak_memory_bytes) / GIGABYTE if metrics.peak_memory_bytes else None


def _memory_of_stages(run: TrainingRun) -> list[Curve]:
    num_stages = max((len(each.peak_memory_bytes or ()) for each in run.iterations), default=0)

    def of_stage(stage: int) -> Value:
        def value(metrics: IterationMetrics) -> float | None:
            peaks = metrics.peak_memory_bytes
            return peaks[stage] / GIGABYTE if peaks is not None and stage < len(peaks) else None

        return value

    # More than eight curves are not told apart.
    shown = range(num_stages) if num_stages <= 8 else (0, num_stages // 2, num_stages - 1)
    return [Curve(f"stage {stage}", _points(run, of_stage(stage)), number) for number, stage in enumerate(shown)]


def _promised_memory(promise: Promise | None) -> list[Level]:
    if promise is None or not promise.predicted.memory_per_rank:
        return []
    totals = [memory["total"] / GIGABYTE for memory in promise.predicted.memory_per_rank]
    return [Level("promised, least to most of a stage", max(totals), min(totals), max(totals))]


def _top(runs: Sequence[TrainingRun], high: float) -> float | None:
    """Where the chart of times ends: one slow iteration shall not flatten all others."""
    top = max(max(CLIPPED_FROM * slow_from([each.iteration_time_s for each in run.steady]), high) for run in runs)
    return top if any(each.iteration_time_s > top for run in runs for each in run.iterations) else None
