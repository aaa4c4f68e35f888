"""Objects that several parts of the JSON documents have, and what the schema says of dataclasses."""

from dataclasses import fields
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, WithJsonSchema

from deepspeed_ext.plan.text.field_texts import field_texts
from megatron_terapipe.search.cost.prediction import RankMemory, TimeBreakdown
from megatron_terapipe.strategy import strategy_schema


def object_schema(kind: type[Any], texts: dict[str, str], **more: str) -> dict[str, Any]:
    """Return the JSON Schema of an object with the fields of a dataclass.

    Args:
        **more: numbers that the object has beside these fields, and their meaning.
    """
    hints = get_type_hints(kind)
    properties = {each.name: TypeAdapter(hints[each.name]).json_schema() for each in fields(kind)}
    properties |= {name: {"type": "number"} for name in more}
    for name, text in {**texts, **more}.items():
        properties[name]["description"] = text
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


StrategyObject = Annotated[dict[str, Any], WithJsonSchema(strategy_schema(whole=True))]
"""A strategy, as `--strategies` and the trainer's `--strategy` read it."""

BreakdownObject = Annotated[dict[str, float], WithJsonSchema(object_schema(TimeBreakdown, field_texts(TimeBreakdown)))]
"""Seconds of an iteration by what they are spent on."""

MemoryObject = Annotated[
    dict[str, float], WithJsonSchema(object_schema(RankMemory, field_texts(RankMemory), total="sum of the others"))
]
"""Bytes of a pipeline rank by what they hold."""


class Part(BaseModel):
    """An object of a document: all of its keys are always there, and no others."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )
