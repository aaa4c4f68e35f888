"""Lines of a metrics file, checked: iterations, evaluations and events of a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import nan
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text.json_text import parse_json
from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.records.events import Event, Note, RunEnd, RunStart, Saved
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics

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
