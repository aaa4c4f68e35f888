"""The metrics file of a run: its lines, their JSON Schema, and the run that they describe.

A run consists of pieces, each from a start to an end. Iterations that were repeated after a restart count once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any, TypeVar, Union

from pydantic import ConfigDict, TypeAdapter, ValidationError

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import parse_json, read_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.records import (
    EvaluationMetrics,
    ExpertLoads,
    IterationMetrics,
    Line,
    Note,
    Record,
    RunEnd,
    RunStart,
    Saved,
)

AnyLine = TypeVar("AnyLine", bound=Line)

EVENTS: dict[str, type[Record]] = {str(kind.event): kind for kind in (RunStart, Saved, Note, RunEnd, ExpertLoads)}
"""Kinds of events, by the value of the key `event`."""

LARGEST, LATEST_S = 1e40, 6e10
"""Magnitudes of numbers at most: more than fp32 has, and a time in the year 3871."""

PARTS = ("validation", "test")
"""Parts of the data that are evaluated on."""


def read_metrics_lines(path: Path) -> tuple[list[Line], tuple[str, ...]]:
    """Return the lines of a metrics file, and warnings about damaged lines, which are skipped."""
    texts = read_text(path).splitlines()
    lines: list[Line] = []
    faults: list[tuple[int, str]] = []
    for number, line in enumerate(texts, start=1):
        try:
            lines.append(line_of(line))
        except UserError as error:
            faults.append((number, str(error)))
    if not any(isinstance(line, IterationMetrics) for line in lines):
        raise ConfigError(
            f"{path} has no line of an iteration in {len(texts)} lines: give the file that a run wrote with "
            "--metrics-file"
        )
    warnings = []
    if faults and faults[-1][0] == len(texts):
        warnings.append(f"{path}: the last line is incomplete, as after a kill, and skipped")
        faults.pop()
    if faults:
        number, message = faults[0]
        others = f", and {len(faults) - 1} more lines" if len(faults) > 1 else ""
        warnings.append(f"{path}: line {number}{others} skipped as damaged ({message.partition(':')[0]})")
    return lines, tuple(warnings)


def line_of(text: str) -> Line:
    """Return the record of a line."""
    values = parse_json(text, "a metrics line")
    if not isinstance(values, dict):
        raise ConfigError(f"{json.dumps(values)[:40]} is not a JSON object: give a metrics file")
    name = values.get("event")
    part = next((part for part in PARTS if f"{part}_lm_loss" in values), None)
    if name is not None:
        if not isinstance(name, str) or name not in EVENTS:
            raise ConfigError(f"event {json.dumps(name)[:40]} is unknown: it is one of {', '.join(EVENTS)}")
        kind: Any = EVENTS[name]
    else:
        kind = IterationMetrics if part is None else EvaluationMetrics
        loss = values.get("lm_loss" if part is None else f"{part}_lm_loss")
        values = values if part is None else {"consumed_samples": 0, **values, "part": part}
        values = {**values, "lm_loss": nan if loss is None else loss}
        if isinstance(further := values.get("mtp_losses"), list):
            values["mtp_losses"] = [nan if each is None else each for each in further]
    try:
        line: Line = _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}: give a file that a run wrote with --metrics-file") from None
    for each in fields(line):
        value, most = getattr(line, each.name), LATEST_S if each.name == "time" else LARGEST
        for number in value if isinstance(value, tuple) else (value,):
            is_unknown_loss = each.name in ("lm_loss", "mtp_losses") and isnan(number)
            if isinstance(number, int | float) and not is_unknown_loss and not abs(number) <= most:
                raise ConfigError(f"{each.name} {str(number)[:20]} is beyond {most:g}: give the file of a real run")
    return line


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def metrics_schema() -> dict[str, Any]:
    """Return the JSON Schema of one line: an iteration, an evaluation or an event."""
    kinds: Any = Union[(IterationMetrics, *EVENTS.values())]
    schema = TypeAdapter[Any](kinds, config=ConfigDict(use_attribute_docstrings=True)).json_schema()
    iteration, further = schema["$defs"]["IterationMetrics"]["properties"], "Losses of further predictions"
    iteration |= {"lm_loss": _loss("Training loss"), "mtp_losses": _losses(further)}
    for name, kind in EVENTS.items():
        event = schema["$defs"][kind.__name__]
        event["properties"] = {"event": {"const": name}, **event["properties"]}
        event["required"] = ["event", *event.get("required", [])]
    for part in PARTS:
        name = f"{part}_lm_loss"
        done = {"type": "integer", "description": "Iterations done."}
        means = {name: _loss("Mean loss"), "mtp_losses": _losses(further)}
        evaluation = {"type": "object", "properties": {"iteration": done, **means}}
        schema["anyOf"].append({**evaluation, "required": ["iteration", name], "additionalProperties": False})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Line of a metrics file", **schema}


def _loss(name: str) -> dict[str, Any]:
    """The schema of a loss. JSON has no NaN."""
    return {"anyOf": [{"type": "number"}, {"type": "null"}], "description": f"{name}; null if it is not finite."}


def _losses(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _loss(name)}


METRICS_FILE = "metrics.jsonl"
"""Name of the metrics file in a directory that is given as a run."""

WARM_UP = 2
"""Iterations after each start that the figures exclude: the first allocates buffers and the optimizer's state, and the
second is the first with all of them."""


@dataclass
class Piece:
    """Lines of a run from one start to its end."""

    start: RunStart
    lines: list[Line] = field(default_factory=list)

    def of(self, kind: type[AnyLine]) -> list[AnyLine]:
        """Return the lines of a kind."""
        return [line for line in self.lines if isinstance(line, kind)]

    @cached_property
    def iterations(self) -> list[IterationMetrics]:
        """Its iterations, each once, in ascending order, also where a damaged line was the start of a later piece."""
        last = {each.iteration: each for each in self.of(IterationMetrics)}
        return [last[number] for number in sorted(last)]

    @property
    def end(self) -> RunEnd | None:
        """The last one; None if it was killed or is still running."""
        return next(reversed(self.of(RunEnd)), None)

    @property
    def first(self) -> int:
        """Its first iteration."""
        return self.iterations[0].iteration if self.iterations else self.start.iteration + 1


@dataclass
class Part:
    """Iterations of a run under one layout: of consecutive starts with the same strategy and devices."""

    start: RunStart
    """The first of the starts."""
    iterations: list[IterationMetrics] = field(default_factory=list)
    warm: list[IterationMetrics] = field(default_factory=list)
    """The same without the first ones after each start."""

    @cached_property
    def steady(self) -> list[IterationMetrics]:
        """Iterations of the last batch size, without the first ones after each start; if there are none, all."""
        last = self.iterations[-1].global_batch_size
        return [each for each in self.warm if each.global_batch_size == last] or self.iterations

    def continues_in(self, start: RunStart) -> bool:
        """Whether a start has its layout."""

        def layout(start: RunStart) -> object:
            return start.strategy, start.machine.device, start.machine.num_devices

        return layout(start) == layout(self.start)


@dataclass(frozen=True)
class TrainingRun:
    """A training run: the contents of its metrics file."""

    name: str
    path: Path
    """Its metrics file."""
    pieces: tuple[Piece, ...]
    """In the order of time."""
    faults: tuple[str, ...] = ()
    """Warnings about skipped lines."""

    @property
    def start(self) -> RunStart:
        """The start of its last piece."""
        return self.pieces[-1].start

    @property
    def end(self) -> RunEnd | None:
        """The end of its last piece."""
        return self.pieces[-1].end

    @cached_property
    def counted(self) -> list[tuple[Piece, list[IterationMetrics]]]:
        """The iterations of each piece that no later piece repeated."""
        remaining = []
        next_first: float = float("inf")
        for piece in reversed(self.pieces):
            remaining.append((piece, [each for each in piece.iterations if each.iteration < next_first]))
            if piece.iterations:  # Else it repeated none: it was killed before its first.
                next_first = min(next_first, piece.first)
        return remaining[::-1]

    @cached_property
    def iterations(self) -> list[IterationMetrics]:
        """Its iterations, each once, in ascending order."""
        return [each for _, iterations in self.counted for each in iterations]

    @cached_property
    def parts(self) -> list[Part]:
        """Its iterations, each once, by layout, in ascending order."""
        parts: list[Part] = []
        for piece, iterations in self.counted:
            if iterations:
                if not parts or not parts[-1].continues_in(piece.start):
                    parts.append(Part(piece.start))
                parts[-1].iterations += iterations
                parts[-1].warm += [each for each in iterations if each.iteration >= piece.first + WARM_UP]
        return parts

    @property
    def steady(self) -> list[IterationMetrics]:
        """The steady iterations of its last layout."""
        return self.parts[-1].steady

    @property
    def num_repeated(self) -> int:
        """Number of iterations that were repeated after a restart."""
        return sum(len(piece.iterations) for piece in self.pieces) - len(self.iterations)

    def evaluations(self) -> list[EvaluationMetrics]:
        """Return its evaluations on the validation data, without those that a later piece repeated."""
        remaining: list[EvaluationMetrics] = []
        for piece in self.pieces:
            if piece.iterations:
                remaining = [each for each in remaining if each.iteration < piece.first]
            remaining += [each for each in piece.of(EvaluationMetrics) if each.part == "validation"]
        return remaining

    def expert_loads(self) -> list[ExpertLoads]:
        """Return the loads of experts, without lines of iterations that a later piece repeated."""
        return [
            line
            for piece, iterations in self.counted
            for line in piece.of(ExpertLoads)
            if iterations and line.iteration <= iterations[-1].iteration
        ]


def read_runs(paths: Sequence[str], *, join: bool = False) -> list[TrainingRun]:
    """Read runs from metrics files, or from directories with one.

    Args:
        join: whether they are pieces of one run, in their order.
    """
    files = [path / METRICS_FILE if path.is_dir() else path for path in map(Path, paths)]
    # The shortest names that tell files apart.
    names = [path.parent.name if path.name == METRICS_FILE and path.parent.name else path.stem for path in files]
    if len(set(names)) < len(names):
        names = [str(path) for path in files]
    runs = []
    for path, name in zip(files, names, strict=True):
        lines, faults = read_metrics_lines(path)
        if not isinstance(lines[0], RunStart):
            raise ConfigError(
                f"{path} does not begin with the start of a run: give the whole file that a run wrote with "
                "--metrics-file"
            )
        runs.append(TrainingRun(name, path, tuple(_pieces(lines)), faults))
    if not join:
        return runs
    pieces = tuple(piece for run in runs for piece in run.pieces)
    return [TrainingRun(names[0], files[0], pieces, tuple(fault for run in runs for fault in run.faults))]


def _pieces(lines: Sequence[Line]) -> list[Piece]:
    """Divide lines at each start."""
    pieces: list[Piece] = []
    for line in lines:
        if isinstance(line, RunStart):
            pieces.append(Piece(line))
        pieces[-1].lines.append(line)
    return pieces
