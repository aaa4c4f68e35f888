"""Builds the engines, holds them against plain torch, and takes their times in turns. All ranks run this together.

First the machine and how quiet it is, then whether an engine computes the losses and gradients of plain torch, then
the turns.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.engines.pipelines import Engine, Entry, Job, Stage, plain_layers
from benchmarks.engines.results import Measured
from benchmarks.measuring.counters import LiveBytes
from benchmarks.measuring.report import one_line, progress


def machine() -> str:
    """Return processor, cores and memory, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, {memory:.0f} GiB"


def software() -> dict[str, str]:
    """Return the versions that matter, by name."""
    return {"Python": platform.python_version()} | {name: version(name) for name in ("torch", "deepspeed", "numpy")}


class Processors:
    """Counts the time of all cores since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def _now(self) -> Mapping[str, float]:
        return psutil.cpu_times()._asdict()

    def shares(self, own_s: float) -> tuple[float, float]:
        """Return the shares of the cores' time that other processes took, and that the host of the machine took.

        Args:
            own_s: seconds of processor time that the processes of the benchmark took.
        """
        spent = {name: after - self._start[name] for name, after in self._now().items()}
        # Linux counts guests within user time, too.
        total = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
        stolen = spent.get("steal", 0.0)
        busy = total - spent["idle"] - spent.get("iowait", 0.0) - stolen
        return max(0.0, (busy - own_s) / total), stolen / total


TOLERANCE = 1e-5
"""Largest relative difference of engines that agree, in fp32: they add the same numbers up in other orders."""


@dataclass(frozen=True)
class Step:
    """One step, watched."""

    loss: float | None
    """Mean over the micro-batches; None on a rank without a loss."""
    gradients: Mapping[str, Tensor]
    """Those the optimizer was given, by the names of the weights, each of its weight's shape [...]."""
    peak_bytes: int
    """Most bytes alive at once of those that the step made: activations, gradients, buffers."""


def take_weights(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Give an engine the weights that all start from.

    Args:
        weights: by name, each [...].
    """
    with torch.no_grad():
        for name, weight in engine.weights.items():
            weight.copy_(weights[name].view_as(weight))


def watched_step(engine: Engine) -> Step:
    """Run a step; keep the values that are compared."""
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update({name: _gradient(weight) for name, weight in engine.weights.items()})

    handle = engine.optimizer.register_step_pre_hook(keep)
    with LiveBytes() as live:
        loss = engine.step()
    handle.remove()
    return Step(loss, gradients, live.peak)


def _gradient(weight: nn.Parameter) -> Tensor:
    if weight.grad is None:
        raise RuntimeError("a weight has no gradient when the optimizer steps")
    return weight.grad.detach().clone()


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of gradients, as a share of the largest element of each gradient.

    Args:
        found: gradients by name, each [...].
    """
    worst = 0.0
    for name, gradient in found.items():
        reference = expected[name].view_as(gradient)
        worst = max(worst, ((gradient - reference).abs().max() / reference.abs().max()).item())
    return worst


MOST_MICRO_BATCHES = 8
"""How far the fewest micro-batches that an engine takes are looked for."""


@dataclass
class Contender:
    """A built engine and its measurements."""

    engine: Engine
    measured: Measured


class Competition:
    """The engines of one job."""

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
        """Time a step of each engine."""
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
        """Measurements of all, in the order of the entries."""
        known = self._refused | {place: contender.measured for place, contender in self._built.items()}
        return tuple(known[place] for place in sorted(known))


def said(line: str) -> None:
    """Print progress on the first rank."""
    if dist.get_rank() == 0:
        progress(line)


def gathered(value: Any) -> list[Any]:
    """Return a value of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _attempt(make: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a function on this rank; if it raises on any rank, None and the reason."""
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
    assert expected.loss is not None, "plain torch has its loss on the first rank"
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
    """Seconds until all ranks are through a step, and seconds of the processors."""
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
