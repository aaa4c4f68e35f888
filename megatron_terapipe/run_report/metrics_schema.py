"""The JSON Schema of a line of the metrics file, made of the dataclasses that the trainer writes."""

from typing import Any

from pydantic import TypeAdapter

from megatron_terapipe.config.fields.options import field_help
from megatron_terapipe.run_report.metrics_lines import EVENTS, PARTS
from megatron_terapipe.training.records.events import Machine
from megatron_terapipe.training.records.metrics import IterationMetrics


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
