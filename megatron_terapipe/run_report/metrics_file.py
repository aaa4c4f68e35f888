"""The metrics file of a run: its lines, checked; their JSON Schema; and the run with the iterations that count.

A run is made of pieces, each from a start to an end. Iterations that were done again after a restart count once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import nan
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import parse_json, read_text
from megatron_terapipe.config.options import field_help
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.records import (
    EvaluationMetrics,
    Event,
    IterationMetrics,
    Machine,
    Note,
    RunEnd,
    RunStart,
    Saved,
)

Line = IterationMetrics | EvaluationMetrics | Event

_Kind = TypeVar("_Kind", bound=Line)

EVENTS: dict[str, type[Event]] = {kind.event: kind for kind in (RunStart, Saved, Note, RunEnd)}
"""Kinds of events, by the value of the key `event`."""

PARTS: tuple[Literal["validation", "test"], ...] = ("validation", "test")
"""Parts of the data that are evaluated on."""


@dataclass(frozen=True, slots=True)
class MetricsLines:
    """Contents of a metrics file."""

    lines: tuple[Line, ...]
    """In their order."""
    faults: tuple[str, ...]
    """What of the file was left out, a line each."""


def read_metrics_lines(path: Path) -> MetricsLines:
    """Read a metrics file; a line that is damaged is left out, and said.

    Raises:
        UserError: if it cannot be read, or has no line of an iteration.
    """
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
    return MetricsLines(tuple(lines), tuple(_told(path, faults, len(texts))))


def line_of(text: str) -> Line:
    """Return what a line says.

    Raises:
        UserError: if it is no line of a metrics file.
    """
    values = parse_json(text, "a metrics line")
    if not isinstance(values, dict):
        raise ConfigError(f"{json.dumps(values)[:40]} is no JSON object: give a metrics file")
    kind = values.get("event")
    if kind is not None:
        if not isinstance(kind, str) or kind not in EVENTS:
            raise ConfigError(f"event {json.dumps(kind)[:40]} is not known: it has {', '.join(EVENTS)}")
        return _checked(EVENTS[kind], values)
    for part in PARTS:
        if f"{part}_lm_loss" in values:
            loss = values[f"{part}_lm_loss"]
            return _checked(
                EvaluationMetrics,
                {"consumed_samples": 0, **values, "part": part, "lm_loss": nan if loss is None else loss},
            )
    return _checked(
        IterationMetrics, {**values, "lm_loss": nan if values.get("lm_loss") is None else values["lm_loss"]}
    )


def _checked(kind: type[_Kind], values: dict[str, Any]) -> _Kind:
    try:
        return _adapters()[kind].validate_python(values)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']}: give a file that a run wrote with --metrics-file") from None


@cache
def _adapters() -> dict[type[Any], TypeAdapter[Any]]:
    """Checks of each kind of line, made where the first line is read."""
    return {kind: TypeAdapter(kind) for kind in (IterationMetrics, EvaluationMetrics, *EVENTS.values())}


def _told(path: Path, faults: list[tuple[int, str]], num_lines: int) -> Iterator[str]:
    if faults and faults[-1][0] == num_lines:
        yield f"{path}: the last line is cut off, as by a run that was killed, and left out"
        faults = faults[:-1]
    if faults:
        number, message = faults[0]
        others = f", and {len(faults) - 1} more lines" if len(faults) > 1 else ""
        yield f"{path}: line {number}{others} left out, because it is damaged ({message.partition(':')[0]})"


def metrics_schema() -> dict[str, Any]:
    """Return the JSON Schema of one line: an iteration, an evaluation or an event."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Line of a metrics file",
        "anyOf": [_iteration(), *(_evaluation(part) for part in PARTS), *(_event(name) for name in EVENTS)],
    }


def _iteration() -> dict[str, Any]:
    schema = _described(IterationMetrics, "Iteration")
    # JSON has no NaN.
    schema["properties"]["lm_loss"] = {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "description": "Training loss; null if it is no number.",
    }
    return schema


def _evaluation(part: str) -> dict[str, Any]:
    loss = {"anyOf": [{"type": "number"}, {"type": "null"}], "description": "Mean loss; null if it is no number."}
    iteration = {"type": "integer", "description": "Iterations done."}
    return {
        "title": f"Evaluation on the {part} data",
        "type": "object",
        "properties": {"iteration": iteration, f"{part}_lm_loss": loss},
        "required": ["iteration", f"{part}_lm_loss"],
        "additionalProperties": False,
    }


def _event(name: str) -> dict[str, Any]:
    schema = _described(EVENTS[name], f"Event: {name}")
    schema["properties"] = {"event": {"const": name}, **schema["properties"]}
    schema["required"] = ["event", *schema["required"]]
    return schema


def _described(kind: type[Any], title: str) -> dict[str, Any]:
    """The schema of a dataclass whose fields have docstrings."""
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    machine = schema.pop("$defs", {}).get("Machine")
    if machine is not None:
        schema["properties"]["machine"] = _with_help(machine, Machine)
    return _with_help(schema, kind) | {"title": title, "additionalProperties": False}


def _with_help(schema: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    for name, text in field_help(kind).items():
        schema["properties"][name]["description"] = text
    return schema


METRICS_FILE = "metrics.jsonl"
"""Name under which the metrics file is looked for where a run is given as a directory."""

WARM_UP = 2
"""Iterations after each start that are no part of the figures: the first makes buffers and the optimizer's state, the
second is the first that finds them."""


@dataclass
class Piece:
    """A run from one start to its end."""

    start: RunStart | None = None
    """How it started; None if the file does not say."""
    iterations: list[IterationMetrics] = field(default_factory=list)
    """In their order."""
    evaluations: list[EvaluationMetrics] = field(default_factory=list)
    """In their order."""
    saves: list[Saved] = field(default_factory=list)
    """Checkpoints for which it waited."""
    notes: list[Note] = field(default_factory=list)
    """Lines of its log."""
    end: RunEnd | None = None
    """How it ended; None if it was killed, goes on, or the file does not say."""

    @property
    def first(self) -> int:
        """Its first iteration."""
        if self.iterations:
            return self.iterations[0].iteration
        return 1 if self.start is None else self.start.iteration + 1

    def add(self, line: Line) -> None:
        """Take one more line."""
        if isinstance(line, IterationMetrics):
            self.iterations.append(line)
        elif isinstance(line, EvaluationMetrics):
            self.evaluations.append(line)
        elif isinstance(line, Saved):
            self.saves.append(line)
        elif isinstance(line, Note):
            self.notes.append(line)
        elif isinstance(line, RunEnd):
            self.end = line
        else:
            self.start = line


@dataclass(frozen=True)
class TrainingRun:
    """A run."""

    name: str
    """For legends."""
    path: Path
    """Its metrics file."""
    pieces: tuple[Piece, ...]
    """In the order in which they ran."""
    faults: tuple[str, ...] = ()
    """What of its files was left out, a line each."""

    @property
    def start(self) -> RunStart | None:
        """How its last piece started, which says how it was trained."""
        return next((piece.start for piece in reversed(self.pieces) if piece.start is not None), None)

    @property
    def end(self) -> RunEnd | None:
        """How it ended."""
        return self.pieces[-1].end

    @cached_property
    def counted(self) -> list[tuple[Piece, list[IterationMetrics]]]:
        """The iterations of each piece that no later piece did again."""
        kept = []
        next_first: float = float("inf")
        for piece in reversed(self.pieces):
            kept.append((piece, [each for each in piece.iterations if each.iteration < next_first]))
            next_first = min(next_first, piece.first)
        return kept[::-1]

    @cached_property
    def iterations(self) -> list[IterationMetrics]:
        """Its iterations, each once, in rising order."""
        return [each for _, iterations in self.counted for each in iterations]

    @cached_property
    def steady(self) -> list[IterationMetrics]:
        """Iterations of the last batch size, without the first ones after each start; all, where that leaves none."""
        last = self.iterations[-1].global_batch_size
        found = [
            each
            for piece, iterations in self.counted
            for each in iterations
            if each.iteration >= piece.first + WARM_UP and each.global_batch_size == last
        ]
        return found or self.iterations

    @property
    def num_repeated(self) -> int:
        """Iterations that were done again after a restart."""
        return sum(len(piece.iterations) for piece in self.pieces) - len(self.iterations)

    def evaluations(self, part: str = "validation") -> list[EvaluationMetrics]:
        """Return its evaluations on a part of the data, those that a later piece did again left out."""
        kept: list[EvaluationMetrics] = []
        for piece in self.pieces:
            kept = [each for each in kept if each.iteration < piece.first]
            kept += [each for each in piece.evaluations if each.part == part]
        return kept


def read_runs(paths: Sequence[str], *, join: bool = False) -> list[TrainingRun]:
    """Read runs.

    Args:
        join: whether they are pieces of one run, in their order.

    Raises:
        UserError: if a file cannot be read, or holds no iteration.
    """
    files = [metrics_file(path) for path in paths]
    names = _names(files)
    runs = [_read_run(path, name) for path, name in zip(files, names, strict=True)]
    if not join:
        return runs
    pieces = tuple(piece for run in runs for piece in run.pieces)
    return [TrainingRun(names[0], files[0], pieces, tuple(fault for run in runs for fault in run.faults))]


def metrics_file(path: str) -> Path:
    """Return the metrics file of a run that is given as a file or as a directory."""
    given = Path(path)
    return given / METRICS_FILE if given.is_dir() else given


def _read_run(path: Path, name: str) -> TrainingRun:
    read = read_metrics_lines(path)
    return TrainingRun(name, path, tuple(_pieces(read.lines)), read.faults)


def _pieces(lines: Sequence[Line]) -> Iterator[Piece]:
    """Divide lines at each start; where the file has none, where iterations go back."""
    piece, begun, last = Piece(), False, 0
    for line in lines:
        goes_back = isinstance(line, IterationMetrics) and line.iteration <= last
        if begun and (isinstance(line, RunStart) or (goes_back and piece.start is None)):
            yield piece
            piece, last = Piece(), 0
        piece.add(line)
        begun = True
        if isinstance(line, IterationMetrics):
            last = line.iteration
    yield piece


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest names that tell files apart."""
    stems = [path.parent.name if path.name == METRICS_FILE and path.parent.name else path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]
