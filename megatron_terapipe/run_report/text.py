"""The report as text: titles, figures with their names, and the summary for a terminal."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.run_report.figures import NO_END, listed
from megatron_terapipe.run_report.report import RunReport
from megatron_terapipe.search.answer.figures import bytes_text, count_text, strategy_text, time_text
from megatron_terapipe.training.records import RunStart


def title_of(reports: Sequence[RunReport]) -> str:
    """Return the title of a report."""
    if len(reports) > 1:
        return f"{len(reports)} training runs"
    run = reports[0].run
    return f"Training run {run.name}" if run.start is None else f"{run.start.model_name}: training run {run.name}"


def heading(start: RunStart | None) -> str:
    """Return the model and the machine in one line; empty if they are unknown."""
    if start is None:
        return ""
    machine = start.machine
    hosts = "" if machine.num_hosts == 1 else f" on {machine.num_hosts} hosts"
    return (
        f"{start.model_name}, {count_text(start.parameters)} parameters · {start.precision} · "
        f"{machine.num_devices} x {machine.device}{hosts}"
    )


def strategy_line(start: RunStart | None) -> str:
    """Return the strategy in one line; empty if it is unknown."""
    if start is None or start.strategy is None:
        return ""
    try:
        return strategy_text(start.strategy)
    except UserError:  # of a later version
        return ""


def about(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the description of a run: names and texts."""
    run, start, figures = report.run, report.run.start, report.figures
    if start is None:
        yield "metrics file", str(run.path)
        return
    yield "strategy", strategy_line(start)
    yield "sequence", f"{start.model.get('seq_length')} tokens"
    yield "started", _date(start.time if run.pieces[0].start is None else run.pieces[0].start.time)
    if figures.wall_s is not None:
        share = figures.in_iterations_s / figures.wall_s if figures.wall_s else 1.0
        yield "took", f"{duration_text(figures.wall_s)}, {share:.0%} of it in iterations"
    yield "ended", end_text(report)
    if figures.starts > 1:
        again = f", {figures.repeated} iterations repeated" if figures.repeated else ""
        yield "starts", f"{figures.starts}{again}"
    yield "host", start.machine.host
    yield "versions", ", ".join(f"{name} {number}" for name, number in start.versions.items())
    yield "metrics file", str(run.path)


def glance(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the main figures of a run: values and their names."""
    figures = report.figures
    if figures.loss is not None:
        yield f"{figures.loss:.4g}", "training loss at the end"
    if figures.validation_loss is not None and figures.best_validation_loss is not None:
        best, where = figures.best_validation_loss
        least = "" if best == figures.validation_loss else f", least {best:.4g} at iteration {where}"
        yield f"{figures.validation_loss:.4g}", f"validation loss{least}"
    predicted = None if report.prediction is None else report.prediction.predicted
    prediction = "" if predicted is None else f", predicted {time_text(predicted.iteration_time_s)}"
    spread = figures.iteration_time_s
    within = f"90 % within {time_text(spread.low)} to {time_text(spread.high)}"
    yield time_text(spread.median), f"an iteration, {within}{prediction}"
    yield f"{figures.tokens_per_s.median:,.0f}", "tokens a second"
    for name, tflops in (("", figures.tflops_per_device), (", causal attention", figures.tflops_per_device_causal)):
        if tflops is not None:
            yield f"{tflops:.3g} T" if tflops >= 1 else f"{tflops * 1e3:.3g} G", f"model FLOP/s a device{name}"
    for name, share, expected in (
        ("MFU", figures.mfu, predicted and predicted.mfu),
        ("causal MFU", figures.mfu_causal, predicted and predicted.mfu_causal),
    ):
        if share is not None:
            yield f"{share:.1%}", name if expected is None else f"{name}, predicted {expected:.0%}"
    if report.steps is not None:
        prediction = "" if predicted is None else f", predicted {predicted.bubble_ratio:.1%}"
        yield f"{report.steps.bubble_ratio:.1%}", f"bubble ratio{prediction}"
    if figures.peak_memory_bytes:
        prediction = ""
        if predicted is not None and predicted.memory_per_rank:
            prediction = f", predicted {bytes_text(predicted.peak_memory_bytes)}"
        yield bytes_text(max(figures.peak_memory_bytes)), f"on the fullest rank{prediction}"
    planned = "" if figures.planned in (None, figures.iterations) else f" of {figures.planned:,} planned"
    tokens = "" if figures.tokens is None else f", {count_text(figures.tokens)} tokens"
    yield f"{figures.iterations:,}", f"iterations{planned}{tokens}"


def duration_text(seconds: float) -> str:
    """Return a duration as text: `12.3 s`, `5 min 2 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 60:
        return time_text(seconds)
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def end_text(report: RunReport) -> str:
    """Return the time and the reason of the end of a run."""
    end, figures = report.run.end, report.figures
    if end is None:
        return f"after iteration {figures.iterations}: {NO_END}"
    return f"{_date(end.time)}, {end.reason or 'the last iteration was reached'}"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


MOST_LISTED = 2
"""Most incidents of a kind with a line of their own."""


def summary(reports: Sequence[RunReport]) -> str:
    """Return the figures of some reports as text."""
    return "\n".join(chain([title_of(reports)], *(_of_run(each, len(reports) > 1) for each in reports)))


def _of_run(report: RunReport, named: bool) -> Iterator[str]:
    run = report.run
    if named:
        yield f"\n{run.name}"
    yield from (f"  {line}" for line in (heading(run.start), strategy_line(run.start)) if line)
    yield from (f"  {value:>12}  {name}" for value, name in glance(report))
    if report.compared:
        yield f"  {'':<18}{'predicted':>12}{'measured':>12}{'difference':>14}"
        for each in report.compared:
            figures = f"{each.text(each.promised):>12}{each.text(each.came):>12}{each.difference_text:>14}"
            yield f"  {each.name:<18}{figures}"
    if run.end is None or run.end.reason:
        yield f"  ended: {end_text(report)}"
    found = [each for each in report.incidents if each.kind not in ("save", "end")]
    yield from (f"  {kind}: {text}" for kind, text in listed(found, MOST_LISTED))
    yield from (f"  note: {line}" for line in report.missing)
