"""Incidents of a run: starts, ends, skipped updates, spikes, slow iterations, saves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal

from megatron_terapipe.run_report.figures import slow_iterations
from megatron_terapipe.run_report.run import Piece, TrainingRun
from megatron_terapipe.search.report.figures import time_text
from megatron_terapipe.training.records.metrics import IterationMetrics

Kind = Literal["start", "restart", "end", "failure", "skipped update", "spike", "slow iteration", "save"]

KINDS: tuple[Kind, ...] = (
    *("start", "restart", "end", "failure"),
    *("skipped update", "spike", "slow iteration", "save"),
)


NO_END = "no end was recorded: it was killed, stood still, or goes on"
"""What is known of a run whose last piece does not say how it ended."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened at an iteration."""

    kind: Kind
    """What it is."""
    first: int
    """Its iteration, or the first of several."""
    last: int
    """The last of them."""
    text: str
    """What is to be said of it."""
    gravity: float = 0.0
    """By which incidents of its kind are told first."""

    @property
    def where(self) -> str:
        """Its iterations in words."""
        if self.first == self.last:
            return f"iteration {self.first}"
        return f"iterations {self.first} to {self.last}"


def incidents(run: TrainingRun) -> list[Incident]:
    """Return what happened in a run, in the order of iterations."""
    found = [*_of_pieces(run), *_skipped(run.iterations), *_spikes(run.iterations), *_slow(run)]
    found += [
        Incident("save", each.iteration, each.iteration, f"training waited {time_text(each.seconds)} for a checkpoint")
        for piece in run.pieces
        for each in piece.saves
    ]
    return sorted(found, key=lambda each: (each.first, KINDS.index(each.kind)))


def told(found: Sequence[Incident], most_of_kind: int) -> list[tuple[str, str]]:
    """Return incidents in words, kind by kind: the kind, and what is said of one incident, or of all that are left.

    Args:
        found: in the order of iterations.
        most_of_kind: how many of a kind are told one by one: the gravest.
    """
    lines: list[tuple[str, str]] = []
    for kind in KINDS:
        of_kind = [each for each in found if each.kind == kind]
        gravest = sorted(of_kind, key=lambda each: -each.gravity)[:most_of_kind]
        lines += [(kind, f"{each.where}: {each.text}") for each in of_kind if each in gravest]
        if more := len(of_kind) - len(gravest):
            lines.append((kind, f"{more} more, the last of all at {of_kind[-1].where}"))
    return lines


def _of_pieces(run: TrainingRun) -> Iterator[Incident]:
    for number, piece in enumerate(run.pieces):
        before = run.pieces[number - 1] if number else None
        if before is not None:
            yield Incident("restart", piece.first, piece.first, _restart_text(before, piece))
        elif piece.first > 1:
            yield Incident("start", piece.first, piece.first, "goes on from a checkpoint")
        last = piece.iterations[-1].iteration if piece.iterations else piece.first
        if piece.end is not None and piece.end.failed:
            yield Incident("failure", last, last, piece.end.reason)
        elif piece.end is not None:
            yield Incident("end", last, last, piece.end.reason or "the last iteration was reached")
        elif piece.start is not None:
            yield Incident("end", last, last, NO_END)


def _restart_text(before: Piece, piece: Piece) -> str:
    last = before.iterations[-1].iteration if before.iterations else before.first - 1
    again = max(last - piece.first + 1, 0)
    parts = [f"started again with iteration {piece.first}"]
    if again:
        parts.append(
            "1 iteration was done a second time" if again == 1 else f"{again} iterations were done a second time"
        )
    if before.end is not None and piece.start is not None:
        parts.append(f"{time_text(max(piece.start.time - before.end.time, 0.0))} after the end of the piece before")
    return ", ".join(parts)


def _skipped(iterations: Iterable[IterationMetrics]) -> Iterator[Incident]:
    bad = {each.iteration: each for each in iterations if each.skipped or not isfinite(each.lm_loss)}
    for first, last in _together(bad):
        if not all(isfinite(bad[number].lm_loss) for number in range(first, last + 1)):
            yield Incident("skipped update", first, last, "the loss was NaN or infinite")
        elif bad[first].loss_scale is None:
            yield Incident("skipped update", first, last, "a gradient was NaN or infinite, and the weights were kept")
        else:
            yield Incident(
                "skipped update", first, last, "a gradient was too large for fp16, and the weights were kept"
            )


def _spikes(iterations: Iterable[IterationMetrics]) -> Iterator[Incident]:
    for each in iterations:
        if each.spiky_loss:
            yield Incident("spike", each.iteration, each.iteration, f"loss {each.lm_loss:.4g}, far above those before")
        if each.large_grads and each.grad_norm is not None:
            text = f"gradient norm {each.grad_norm:.4g}, far above those before"
            yield Incident("spike", each.iteration, each.iteration, text)


def _slow(run: TrainingRun) -> Iterator[Incident]:
    times = sorted(each.iteration_time_s for each in run.steady)
    middle = times[len(times) // 2]
    for each in slow_iterations(run):
        text = f"{time_text(each.iteration_time_s)}, {each.iteration_time_s / middle:.1f} times the median"
        yield Incident("slow iteration", each.iteration, each.iteration, text, gravity=each.iteration_time_s)


def _together(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    listed = list(numbers)
    starts = [number for number, before in zip(listed, [None, *listed], strict=False) if number - 1 != before]
    ends = [number for number, after in pairwise([*listed, -1]) if number + 1 != after]
    yield from zip(starts, ends, strict=True)
