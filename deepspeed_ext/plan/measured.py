"""Measured steps: records of the trainer, their comparison with a simulation, and the causes of the difference.

    measured    stage 0 | F0.0 F0.1      .      B0.1 B0.0        of each op: start, end
                          `--- medians over micro-batches and steps = op costs ---.
    simulated   stage 0 | F0.0 F0.1    .    B0.1 B0.0           <----------------'

The simulation has the order, the dependencies and the times of ops, so the rest of a measured step is ops that took
longer than usual, and gaps in front of ops that had all they needed. A second simulation, with the time that each op
really took, separates these two. The clocks of ranks start at a barrier; a gap that seems to end before its cause
counts as none.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from deepspeed_ext.plan.costs import OpCosts, Table
from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, prerequisites, result
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.text_files import parse_file, parse_json
from deepspeed_ext.plan.timeline import Span, Timeline, executed_order

__all__ = ["Comparison", "Difference", "StepRecord", "measured_costs"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step."""

    timeline: Timeline
    schedule: str | None = None
    """Name of the schedule; None if unknown."""
    iteration: int | None = None
    """The step's number in its run; None if it was simulated."""
    token_slices: tuple[float, ...] = ()
    """Tokens of each token slice; empty if unknown."""

    def to_json(self) -> str:
        """Write the step as JSON: `from_json` reads it back, and `Timeline.from_json` reads its timeline."""
        about = {"schedule": self.schedule, "iteration": self.iteration, "token_slices": list(self.token_slices)}
        return json.dumps(about | json.loads(self.timeline.to_json()))

    @classmethod
    def from_json(cls, text: str) -> "StepRecord":
        """Read a step, or a timeline, which has fewer fields."""
        timeline = Timeline.from_json(text)
        fields: Any = parse_json(text, "a measured step")
        schedule, iteration = fields.get("schedule"), fields.get("iteration")
        lengths = fields.get("token_slices") or []
        if (
            not isinstance(schedule, str | None)
            or not isinstance(iteration, int | None)
            or not isinstance(lengths, list)
            or any(isinstance(length, bool) or not isinstance(length, int | float) for length in lengths)
            or len(lengths) not in (0, timeline.shape.num_token_slices)
        ):
            raise PlanError(
                "not a measured step (schedule, iteration or token_slices are not of the trainer): write it again"
            )
        return cls(timeline, schedule, iteration, tuple(lengths))


STEP_FILES = "iteration_*.json"
"""Name of the files of measured steps that the trainer writes."""


def _read_steps(path: Path) -> list[StepRecord]:
    """Read the step of a file, or the steps of a directory in the order of their iterations."""
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(STEP_FILES))
        if not files:
            raise UserError(f"{path} has no {STEP_FILES}, which the trainer writes with --timeline: name another")
    return [parse_file(file, StepRecord.from_json) for file in files]


def _alike(steps: list[StepRecord]) -> list[StepRecord]:
    """The steps with the order of the last one: a run may ramp its batches up, or continue with another schedule."""

    def kind(step: StepRecord) -> tuple[object, ...]:
        return step.timeline.shape, step.timeline.unit, step.token_slices, executed_order(step.timeline)

    last = kind(steps[-1])
    return [step for step in steps if kind(step) == last]


def _name_of(path: Path, steps: list[StepRecord]) -> str:
    """Return the name that drawings give the steps."""
    iterations = [step.iteration for step in steps if step.iteration is not None]
    if not iterations:
        return path.stem
    numbers = f"iteration {iterations[0]}"
    if len(iterations) > 1:
        numbers = f"iterations {iterations[0]} to {iterations[-1]}"
    return f"{steps[0].schedule or path.stem}, {numbers}"


@dataclass(frozen=True, slots=True)
class Gap:
    """The time in front of an op on its rank."""

    dependency: float
    """Time in which an input was still being computed on another rank."""
    beyond: float
    """The rest, until the op began: its input was on the way, or the host had other things to do."""
    waited: bool
    """Whether an input was computed after the op before had ended."""


@dataclass(frozen=True, slots=True)
class RankTime:
    """Parts of the time of a rank in a step; they add up to the makespan."""

    busy: float
    """In ops."""
    dependency: float
    """Waiting for ops of other ranks, at the start and the end of the step too."""
    transfer: float
    """Waiting for results that other ranks had computed."""
    host_overhead: float
    """Between ops, with all inputs there."""


def gaps(timeline: Timeline) -> list[list[Gap]]:
    """Return the gap in front of each op, per rank."""
    ended = {result(span.op): span for row in timeline.spans for span in row}
    found = []
    for row in timeline.spans:
        of_rank: list[Gap] = []
        free = timeline.start
        for op, start, end in row:
            needed = [ended[each] for each in prerequisites(op, timeline.shape) if each in ended]
            latest = max((span.end for span in needed), default=free)
            there = min(max(latest, free), max(start, free))
            of_rank.append(Gap(there - free, max(start - there, 0.0), latest > free))
            free = max(end, free)
        found.append(of_rank)
    return found


_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Difference:
    """An op that took longer, or began later, than the simulation expects."""

    op: Op
    duration: float
    """Time it took beyond its cost; less than 0 if it was faster."""
    late: float
    """Time that it began after its rank was free and its inputs were computed."""

    @property
    def size(self) -> float:
        """Time that the simulation does not account for."""
        return self.duration + self.late


@dataclass(frozen=True)
class Comparison:
    """Steps that ran one program, and the simulation of it with the op costs they had."""

    steps: tuple[Timeline, ...]
    """Timelines of the steps, of one shape and in one order."""

    def __post_init__(self) -> None:
        if not self.steps:
            raise PlanError("no measured step to compare: give at least one")
        first, *others = ((step.shape, step.unit, executed_order(step)) for step in self.steps)
        different = next((number for number, other in enumerate(others, start=1) if other != first), None)
        if different is not None:
            raise PlanError(
                f"step {different} differs from the first in its shape, unit or order of ops: compare steps of one run"
            )

    @cached_property
    def measured(self) -> Timeline:
        """The step with the median makespan, the lower one of an even number: the one that is shown."""
        return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]

    @property
    def shape(self) -> PipelineShape:
        """Shape of the pipeline."""
        return self.measured.shape

    @cached_property
    def costs(self) -> OpCosts:
        """Times of the ops: medians over micro-batches and steps; transfers for nothing."""
        return measured_costs(self.steps)

    @cached_property
    def simulated(self) -> Timeline:
        """The order that ran, simulated only with the op costs."""
        return self._simulated(self.costs)

    @cached_property
    def simulated_with_gaps(self) -> Timeline:
        """The simulation with the estimated transfer time and host overhead on top."""

        def later(table: Table) -> Table:
            return tuple(tuple(time + self.host_overhead for time in row) for row in table)

        costs = self.costs
        weight_gradient = None if costs.weight_gradient is None else later(costs.weight_gradient)
        # The time that an op waits contains the host's part, which now is in the op before.
        transfer = max(self.transfer - self.host_overhead, 0.0)
        return self._simulated(OpCosts(later(costs.forward), later(costs.backward), weight_gradient, transfer))

    @cached_property
    def simulated_with_own_times(self) -> Timeline:
        """The simulation with the measured time of each op of the shown step: it differs only by gaps."""
        own = {span.op: span.end - span.start for row in self.measured.spans for span in row}
        return self._simulated(_OwnTimes(self.costs.forward, self.costs.backward, self.costs.weight_gradient, own=own))

    def _simulated(self, costs: OpCosts) -> Timeline:
        return replace(simulate(executed_order(self.measured), self.shape, costs), unit=self.measured.unit)

    @property
    def efficiency(self) -> float:
        """Eta: simulated over measured makespan; 1 means that order and op times explain everything."""
        return self.simulated.makespan / self.measured.makespan if self.measured.makespan else 1.0

    @cached_property
    def step_efficiencies(self) -> tuple[float, ...]:
        """Eta of each step for itself, with the mean times of its own ops: it does not mind steps that differ."""
        simulated = (simulate(executed_order(one), one.shape, measured_costs([one], fmean)) for one in self.steps)
        pairs = zip(self.steps, simulated, strict=True)
        return tuple(expected.makespan / one.makespan if one.makespan else 1.0 for one, expected in pairs)

    @cached_property
    def gaps(self) -> list[list[Gap]]:
        """Gaps of the shown step: the wait in front of each op, per rank."""
        return gaps(self.measured)

    @cached_property
    def transfer(self) -> float:
        """Estimated time from the end of an op until its reader on another rank runs, where the reader waited."""
        waited = [gap.beyond for step in self.steps for row in gaps(step) for gap in row if gap.waited]
        return median(waited) if waited else 0.0

    @cached_property
    def host_overhead(self) -> float:
        """Estimated time between two ops of a rank, where the second waits for nothing."""
        idle = [gap.beyond for step in self.steps for row in gaps(step) for gap in row[1:] if not gap.waited]
        return median(idle) if idle else 0.0

    @cached_property
    def rank_times(self) -> list[RankTime]:
        """Parts of the time of each rank in the shown step: its gaps added up."""
        measured = self.measured
        return [
            RankTime(
                busy,
                sum(gap.dependency for gap in row) + measured.end - (spans[-1].end if spans else measured.start),
                sum(gap.beyond for gap in row if gap.waited),
                sum(gap.beyond for gap in row if not gap.waited),
            )
            for busy, spans, row in zip(measured.busy, measured.spans, self.gaps, strict=True)
        ]

    def mean_times(self) -> dict[OpKind, tuple[float, float]]:
        """Mean time of an op by kind: over the measured steps, and in the simulation."""

        def means(timelines: Sequence[Timeline]) -> dict[OpKind, float]:
            by_kind = _durations(timelines, lambda span: span.op.kind)
            return {kind: fmean(times) for kind, times in by_kind.items()}

        measured, simulated = means(self.steps), means([self.simulated])
        return {kind: (measured[kind], simulated[kind]) for kind in OpKind if kind in measured}

    def differences(self) -> list[Difference]:
        """Ops of the shown step, by the part of their time that the simulation does not explain, largest first."""
        expected = {span.op: span.end - span.start for row in self.simulated.spans for span in row}
        found = [
            Difference(span.op, span.end - span.start - expected[span.op], gap.beyond)
            for spans, row in zip(self.measured.spans, self.gaps, strict=True)
            for span, gap in zip(spans, row, strict=True)
        ]
        return sorted(found, key=lambda difference: -abs(difference.size))


@dataclass(frozen=True)
class _OwnTimes(OpCosts):
    """Costs that differ from op to op."""

    own: Mapping[Op, float] = field(default_factory=dict)

    def duration(self, op: Op) -> float:
        """Time of one op."""
        return self.own[op]


def measured_costs(steps: Sequence[Timeline], average: Callable[[Sequence[float]], float] = median) -> OpCosts:
    """Return the times of ops per stage and token slice: medians over micro-batches and steps, or another average.

    Where a stage ran some backwards whole and others in two parts, the parts give their own costs; where it ran none in
    parts for some token slice, the whole is divided as all other backwards are.
    """
    shape = steps[0].shape
    times = _durations(steps, lambda span: (span.op.kind, span.op.stage, span.op.token_slice))
    cost = {key: average(values) for key, values in times.items()}
    apart = any(kind is OpKind.WEIGHT_GRADIENT for kind, *_ in cost)
    share = _input_gradient_share(cost) if apart else 1.0

    def time(kind: OpKind, of_whole: float, stage: int, token_slice: int) -> float:
        found = cost.get((kind, stage, token_slice))
        whole = None if kind is OpKind.FORWARD else cost.get((OpKind.BACKWARD, stage, token_slice))
        if found is None and whole is not None:
            found = whole * of_whole
        if found is None:
            raise PlanError(
                f"the measured steps have no op {Op(kind, stage, 0, token_slice)} and none of its kind there: "
                "measure whole training steps"
            )
        return found

    def table(kind: OpKind, of_whole: float = 1.0) -> Table:
        """Times of a kind; `of_whole` is its share of a whole backward."""
        stages, token_slices = range(shape.num_stages), range(shape.num_token_slices)
        return tuple(tuple(time(kind, of_whole, stage, each) for each in token_slices) for stage in stages)

    return OpCosts(
        table(OpKind.FORWARD),
        table(OpKind.INPUT_GRADIENT, share) if apart else table(OpKind.BACKWARD),
        table(OpKind.WEIGHT_GRADIENT, 1 - share) if apart else None,
    )


def _input_gradient_share(cost: Mapping[tuple[OpKind, int, int], float]) -> float:
    """Share of the input gradients in backwards that ran in two parts."""
    sums = {kind: sum(time for (each, *_), time in cost.items() if each is kind) for kind in OpKind}
    both = sums[OpKind.INPUT_GRADIENT] + sums[OpKind.WEIGHT_GRADIENT]
    return sums[OpKind.INPUT_GRADIENT] / both if both else 0.5


def _durations(steps: Sequence[Timeline], key: Callable[[Span], _Key]) -> dict[_Key, list[float]]:
    times: dict[_Key, list[float]] = defaultdict(list)
    for step in steps:
        for row in step.spans:
            for span in row:
                times[key(span)].append(span.end - span.start)
    return times


def read_comparison(path: Path) -> tuple[str, list[StepRecord], Comparison]:
    """Return the measured steps of a file or of a directory: their name in drawings, they, and their simulation."""
    steps = _alike(_read_steps(path))
    try:
        comparison = Comparison(tuple(step.timeline for step in steps))
        comparison.simulated  # noqa: B018 - simulated here, so that its errors name the path
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return _name_of(path, steps), steps, comparison
