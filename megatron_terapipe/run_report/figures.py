"""Main figures of a run, and its incidents: starts, ends, skipped updates, spikes, slow iterations, saves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from statistics import fmean, median, median_high, quantiles
from typing import Literal, get_args

from megatron_terapipe.records import (
    IterationMetrics,
    Note,
    RunEnd,
    RunStart,
    Saved,
    latest_loads,
    outlier_bound,
    starved_text,
)
from megatron_terapipe.run_report.metrics_file import Part, Piece, TrainingRun
from megatron_terapipe.texts import strategy_text, time_text

LAST = 10
"""Iterations whose losses are averaged for the loss at the end."""

SPREADS, LEAST_RATIO = 7.0, 1.3
"""An iteration is slow at so many spreads above the median, and at least so many times the median."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of some measurements."""

    median: float
    """Median."""
    low: float
    """5th percentile."""
    high: float
    """95th percentile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the distribution of some values, at least one."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        twentieths = quantiles(values, n=20, method="inclusive")
        return cls(median(values), twentieths[0], twentieths[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a run."""

    iterations: int
    """Iterations done, each counted once."""
    planned: int
    """The last iteration that was planned."""
    tokens: int | None
    """Tokens trained on; None if the length of sequences is not known."""
    loss: float | None
    """Mean training loss of the last iterations; None if none of them is finite."""
    validation_loss: float | None
    """Loss of the last evaluation; None if there was none."""
    best_validation_loss: tuple[float, int] | None
    """Lowest loss of all evaluations, and its iteration."""
    iteration_time_s: Spread
    """Seconds of an iteration."""
    tokens_per_s: Spread
    """Tokens trained on in a second."""
    tflops_per_device: float | None
    """Model FLOPs in a second and device, in 10^12, with full attention; None for layers of a program's own."""
    tflops_per_device_causal: float | None
    """The same with the scores that causal attention computes."""
    mfu: float | None
    """Share of the devices' peak with full attention; None if the peak is unknown."""
    mfu_causal: float | None
    """The same with the scores that causal attention computes."""
    peak_memory_bytes: tuple[int, ...]
    """Peak memory of a rank of each stage; empty if it was not measured."""
    skipped: int
    """Iterations whose update was skipped."""
    repeated: int
    """Iterations that were repeated after a restart."""
    starts: int
    """Number of starts."""
    in_iterations_s: float
    """Seconds in iterations, repeated ones included."""
    wall_s: float | None
    """Seconds from the first start to the last event, breaks included; None if unknown."""


def figures_of(run: TrainingRun) -> Figures:
    """Return the figures of a run."""
    every, steady, start = run.iterations, run.steady, run.start
    losses = [each.lm_loss for each in every[-LAST:] if isfinite(each.lm_loss)]
    evaluations = [each for each in run.evaluations() if isfinite(each.lm_loss)]
    best = min(evaluations, key=lambda each: each.lm_loss, default=None)
    seq_length = start.model.get("seq_length")
    return Figures(
        iterations=every[-1].iteration,
        planned=start.train_iters,
        tokens=None if not isinstance(seq_length, int) else every[-1].consumed_samples * seq_length,
        loss=fmean(losses) if losses else None,
        validation_loss=evaluations[-1].lm_loss if evaluations else None,
        best_validation_loss=None if best is None else (best.lm_loss, best.iteration),
        iteration_time_s=Spread.of([each.iteration_time_s for each in steady]),
        tokens_per_s=Spread.of([each.tokens_per_second for each in steady]),
        tflops_per_device=_median(each.tflops_per_device for each in steady),
        tflops_per_device_causal=_median(each.tflops_per_device_causal for each in steady),
        mfu=_median(each.mfu for each in steady),
        mfu_causal=_median(each.mfu_causal for each in steady),
        peak_memory_bytes=peak_memory(run),
        skipped=sum(each.skipped for each in every),
        repeated=run.num_repeated,
        starts=len(run.pieces),
        in_iterations_s=sum(each.iteration_time_s for piece in run.pieces for each in piece.iterations),
        wall_s=_wall_time(run),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return median(known) if known else None


def peak_memory(run: TrainingRun) -> tuple[int, ...]:
    """Return the peak memory of a rank of each stage, in the last piece in which it was measured."""
    for piece in reversed(run.pieces):
        measured = [each.peak_memory_bytes for each in piece.iterations if each.peak_memory_bytes]
        if measured:
            return tuple(max(of_stage) for of_stage in zip(*measured, strict=False))
    return ()


def _wall_time(run: TrainingRun) -> float | None:
    lines = [line for piece in run.pieces for line in piece.lines]
    times = [line.time for line in lines if isinstance(line, RunStart | Saved | Note | RunEnd)]
    return max(times) - min(times) if times else None


Kind = Literal[
    "start", "restart", "end", "failure", "skipped update", "spike", "slow iteration", "starved expert", "save"
]

KINDS: tuple[Kind, ...] = get_args(Kind)

NO_END = "no end was recorded: it was killed, hangs, or is still running"
"""Text for a run without an end in its file."""


@dataclass(frozen=True, slots=True)
class Incident:
    """An event at one or several iterations."""

    kind: Kind
    """Kind of the event."""
    first: int
    """First iteration."""
    last: int
    """Last iteration."""
    text: str
    """Description."""
    gravity: float = 0.0
    """Times the median of a slow iteration, 0 for other kinds: the gravest of a kind are listed."""

    @property
    def where(self) -> str:
        """Its iterations as text."""
        if self.first == self.last:
            return f"iteration {self.first}"
        return f"iterations {self.first} to {self.last}"


def incidents(run: TrainingRun) -> list[Incident]:
    """Return the incidents of a run, in the order of time."""

    def number_of(incident: Incident) -> int:
        """Number of the start whose iteration was not repeated later."""
        return max(n for n, each in enumerate(run.pieces) if each.iterations and each.first <= incident.first)

    counted = (*_skipped(run.iterations), *_spikes(run.iterations), *_slow(run), *_starved(run))
    found = [*_of_pieces(run), *((number_of(each), each) for each in counted)]
    for number, piece in enumerate(run.pieces):
        for each in piece.of(Saved):
            text = f"training waited {time_text(each.seconds)} for a checkpoint"
            found.append((number, Incident("save", each.iteration, each.iteration, text)))
    found.sort(key=lambda each: (each[0], each[1].first, KINDS.index(each[1].kind)))
    return [each for _, each in found]


def listed(found: Sequence[Incident], most_of_kind: int) -> list[tuple[str, str]]:
    """Return a line for each incident, with its kind; at the end one line for all beyond the gravest of a kind.

    Args:
        found: in the order of time.
    """
    gravest: list[Incident] = []
    rest: list[tuple[str, str]] = []
    for kind in KINDS:
        of_kind = [each for each in found if each.kind == kind]
        gravest += sorted(of_kind, key=lambda each: -each.gravity)[:most_of_kind]
        if (more := len(of_kind) - most_of_kind) > 0:
            rest.append((kind, f"{more} more, the last at {of_kind[-1].where}"))
    return [(each.kind, f"{each.where}: {each.text}") for each in found if each in gravest] + rest


def strategy_line(start: RunStart) -> str:
    """Return the strategy in one line; empty if it is unknown."""
    return "" if start.strategy is None else strategy_text(start.strategy)


def _of_pieces(run: TrainingRun) -> Iterator[tuple[int, Incident]]:
    for number, piece in enumerate(run.pieces):
        before = run.pieces[number - 1] if number else None
        if before is not None:
            yield number, Incident("restart", piece.first, piece.first, _restart_text(before, piece))
        elif piece.first > 1:
            yield number, Incident("start", piece.first, piece.first, "resumed from a checkpoint")
        last = piece.iterations[-1].iteration if piece.iterations else piece.first
        if piece.end is not None and piece.end.failed:
            yield number, Incident("failure", last, last, piece.end.reason)
        elif piece.end is not None:
            yield number, Incident("end", last, last, piece.end.reason or "the last iteration was reached")
        else:
            yield number, Incident("end", last, last, NO_END)


def _restart_text(before: Piece, piece: Piece) -> str:
    last = before.iterations[-1].iteration if before.iterations else before.first - 1
    again = max(last - piece.first + 1, 0) if piece.iterations else 0
    parts = [f"started again with iteration {piece.first}"]
    if again:
        parts.append(f"{'1 iteration was' if again == 1 else f'{again} iterations were'} repeated")
    if before.end is not None:
        parts.append(f"{time_text(max(piece.start.time - before.end.time, 0.0))} after the previous end")
    if not Part(before.start).continues_in(piece.start):
        parts.append(f"under another layout, {strategy_line(piece.start)}")
    return ", ".join(parts)


def _skipped(iterations: Iterable[IterationMetrics]) -> Iterator[Incident]:
    bad = {each.iteration: each for each in iterations if each.skipped or not isfinite(each.lm_loss)}
    for first, last in _together(bad):
        if not all(isfinite(bad[number].lm_loss) for number in range(first, last + 1)):
            text = "the loss was NaN or infinite"
        elif bad[first].loss_scale is None:
            text = "a gradient was NaN or infinite, and the update was skipped"
        else:
            text = "a gradient was too large for fp16, and the update was skipped"
        yield Incident("skipped update", first, last, text)


def _spikes(iterations: Iterable[IterationMetrics]) -> Iterator[Incident]:
    for each in iterations:
        names = [(f"loss {each.lm_loss:.4g}", each.spiky_loss)]
        if each.grad_norm is not None:
            names.append((f"gradient norm {each.grad_norm:.4g}", each.large_grads))
        for name, is_spike in names:
            if is_spike:
                yield Incident("spike", each.iteration, each.iteration, f"{name}, far above the previous ones")


def _slow(run: TrainingRun) -> Iterator[Incident]:
    """Yield the iterations that took far longer than others of their layout and batch size, without the first ones."""
    for part in run.parts:
        # They have one batch size, except in a part that is too short to exclude any.
        for _, group in groupby(part.steady, key=lambda each: each.global_batch_size):
            alike = list(group)
            bound = outlier_bound((each.iteration_time_s for each in alike), SPREADS, LEAST_RATIO)
            middle = median_high(each.iteration_time_s for each in alike)
            for each in alike:
                if each.iteration_time_s > bound:
                    ratio = each.iteration_time_s / middle
                    text = f"{time_text(each.iteration_time_s)}, {ratio:.1f} times the median"
                    yield Incident("slow iteration", each.iteration, each.iteration, text, gravity=ratio)


def _starved(run: TrainingRun) -> Iterator[Incident]:
    """Yield one incident if experts are starved at the end of the run."""
    loads = latest_loads(run.expert_loads())
    if loads is not None and loads.starved:
        first = loads.iteration - loads.iterations + 1
        yield Incident("starved expert", first, loads.iteration, starved_text(loads))


def _together(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each series of consecutive numbers."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        together = [number for _, number in group]
        yield together[0], together[-1]
