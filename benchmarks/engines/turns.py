"""Builds the engines, holds them against plain torch, and takes their times in turns. All ranks run this together.

build     one that refuses the job gets a row that says why, and how many micro-batches it needs
watch     a first step from the same weights: loss, gradients and peak memory; whoever disagrees is not timed
rounds    a step of each; the order is turned on from round to round, and every second time reversed
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines.agreement import TOLERANCE, Step, largest_difference, take_weights, watched_step
from benchmarks.engines.catalogue import Entry
from benchmarks.engines.pipelines.engine import Engine, Job
from benchmarks.engines.pipelines.plain_gpt import Stage, plain_layers
from benchmarks.engines.results import Measured
from benchmarks.measuring.report import one_line, progress

MOST_MICRO_BATCHES = 8
"""How far the fewest micro-batches that an engine takes are looked for."""


@dataclass
class Contender:
    """An engine that was built, and what is known of it so far."""

    engine: Engine
    measured: Measured


class Competition:
    """The engines of one job.

    Args:
        entries: the engines; the first one is plain torch.
    """

    def __init__(self, job: Job, entries: Sequence[Entry]) -> None:
        self.job = job
        self._refused: dict[int, Measured] = {}
        self._built: dict[int, Contender] = {}
        for place, entry in enumerate(entries):
            self._build(place, entry)
        self._watch()

    def _build(self, place: int, entry: Entry) -> None:
        said(f"{self.job.num_micro_batches} micro-batches: {entry.name}")
        blank = Measured(engine=entry.name.engine, schedule=entry.name.schedule)
        engine, problem = _attempt(lambda: entry.build(self.job))
        if engine is None:
            needs = next((count for count in self._more() if _takes(entry, self.job, count)), None)
            self._refused[place] = replace(blank, problem=problem, needs=needs)
        else:
            self._built[place] = Contender(engine, blank)

    def _more(self) -> Iterable[int]:
        return range(self.job.num_micro_batches + 1, MOST_MICRO_BATCHES + 1)

    def _watch(self) -> None:
        layers = plain_layers(self.job.model)
        whole = Stage(layers, 0, len(layers)).named_weights()
        expected: Step | None = None
        for place, contender in list(self._built.items()):
            take_weights(contender.engine, whole)
            step, problem = _attempt(lambda engine=contender.engine: watched_step(engine))
            if step is None:
                self._out(place, replace(contender.measured, problem=problem))
                continue
            if expected is None:
                expected = _for_all(step, whole)
            contender.measured = _compared(contender.measured, step, expected)
            said(f"  {contender.measured.name}: gradients differ by {contender.measured.gradient_difference:.1e}")
            if contender.measured.problem is not None:
                self._out(place, contender.measured)

    def _out(self, place: int, measured: Measured) -> None:
        self._refused[place] = measured
        del self._built[place]

    def round(self, number: int) -> None:
        """Time a step of each engine.

        Args:
            number: of the round; the order depends on it.
        """
        places = list(self._built)
        first = number * max(1, len(places) // 3) % len(places)
        # Who comes after whom must change: a machine is slow for a while, and a step leaves memory behind.
        for place in (*places[first:], *places[:first])[:: -1 if number % 2 else 1]:
            contender = self._built[place]
            seconds, cpu_seconds = _timed(contender.engine.step)
            contender.measured = replace(
                contender.measured,
                seconds=(*contender.measured.seconds, seconds),
                cpu_seconds=(*contender.measured.cpu_seconds, cpu_seconds),
            )
            said(f"  round {number + 1}: {contender.measured.name}: {seconds:.3f} s")

    def measured(self) -> tuple[Measured, ...]:
        """What is known of all, in the order of the entries."""
        known = self._refused | {place: contender.measured for place, contender in self._built.items()}
        return tuple(known[place] for place in sorted(known))


def said(line: str) -> None:
    """Say on the first rank what is being done."""
    if dist.get_rank() == 0:
        progress(line)


def gathered(value: Any) -> list[Any]:
    """Return a value of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _attempt(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a function returns on this rank, unless it raises on some rank: then None, and why."""
    made, problem = None, None
    try:
        made = make()
    except Exception as error:  # Whatever others raise is what the table says of them.
        problem = one_line(str(error) or type(error).__name__)
    problems = [each for each in gathered(problem) if each is not None]
    return (None, problems[0]) if problems else (made, None)


def _takes(entry: Entry, job: Job, num_micro_batches: int) -> bool:
    engine, _ = _attempt(lambda: entry.build(replace(job, num_micro_batches=num_micro_batches)))
    return engine is not None


def _for_all(step: Step, weights: dict[str, Any]) -> Step:
    """The step of the first rank, on all ranks."""
    losses = gathered(step.loss)
    gradients = {name: step.gradients.get(name, torch.empty_like(weight)) for name, weight in weights.items()}
    for gradient in gradients.values():
        dist.broadcast(gradient.detach(), src=0)
    return Step(losses[0], {name: each.detach() for name, each in gradients.items()}, step.peak_bytes)


def _compared(measured: Measured, step: Step, expected: Step) -> Measured:
    assert expected.loss is not None, "plain torch knows its loss on the first rank"
    losses = [loss for loss in gathered(step.loss) if loss is not None]
    of_loss = max(abs(loss / expected.loss - 1) for loss in losses)
    of_gradients = max(gathered(largest_difference(step.gradients, expected.gradients)))
    covered = {name for names in gathered(list(step.gradients)) for name in names}
    problem = None
    if covered != set(expected.gradients):
        problem = f"no gradients of {len(set(expected.gradients) - covered)} weights reach the optimizer"
    elif max(of_loss, of_gradients) > TOLERANCE:
        problem = f"loss differs by {of_loss:.1e}, gradients by {of_gradients:.1e}"
    return replace(
        measured,
        loss_difference=of_loss,
        gradient_difference=of_gradients,
        peak_bytes=tuple(gathered(step.peak_bytes)),
        problem=problem,
    )


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds until all ranks are through a step, and those of the processors."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    cpu_seconds = time.process_time() - cpu_start
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds, sum(gathered(cpu_seconds))


def product_times() -> Iterator[float]:
    """Yield the seconds of one matrix product each time, which should always be the same; of the slower rank."""
    left, right = torch.ones(1024, 1024), torch.ones(1024, 1024)
    while True:
        seconds, _ = _timed(lambda: [left @ right for _ in range(8)])
        yield seconds
