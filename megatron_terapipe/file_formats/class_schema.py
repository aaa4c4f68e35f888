"""JSON Schemas made from classes: those that write a file, and those that describe one here."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, TypeAdapter

from deepspeed_ext.plan.text_files import field_texts

ABSENT: Any = None
"""Default of a key of a description that may be left out, and is never null."""


def dataclass_schema(kind: type[Any], *, whole: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass that `asdict` writes: its fields are the keys, and there are no others.

    The texts below its fields are their descriptions.

    Args:
        whole: whether all keys are there, as they are in what is written; else those with a default may be left out.
    """
    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    for each in _dataclasses_of(kind):
        part = schema if each is kind else schema["$defs"][each.__name__]
        part["description"] = (each.__doc__ or "").partition("\n")[0]
        part["required"] = [one.name for one in fields(each) if whole or one.default is one.default_factory is MISSING]
        part["additionalProperties"] = False
        for name, text in field_texts(each).items():
            part["properties"][name]["description"] = text[:1].upper() + text[1:]
    return schema


def _dataclasses_of(kind: type[Any]) -> Iterator[type[Any]]:
    """A dataclass, and those that its fields have."""
    yield kind
    for hint in get_type_hints(kind).values():
        for each in (hint, *get_args(hint)):
            if is_dataclass(each):
                yield from _dataclasses_of(each)  # type: ignore[arg-type]


def description_schema(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of a file that is described here: it has the keys of one of these classes.

    Args:
        *kinds: the classes. Keys whose default is `ABSENT` may be left out.
    """
    whole: Any = kinds[0]
    for each in kinds[1:]:
        whole |= each
    schema: dict[str, Any] = TypeAdapter(whole).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        for each in part.get("properties", {}).values():
            if each.get("default", MISSING) is None and {"type": "null"} not in each.get("anyOf", []):
                del each["default"]
    return schema
