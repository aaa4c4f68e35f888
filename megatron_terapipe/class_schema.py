"""JSON Schemas made from the classes that write a file, or describe one."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter

from deepspeed_ext.plan.text_files import field_texts

ABSENT: Any = None
"""Default of a key of a description that may be left out, and is never null."""


def class_schema(kind: Any, *, whole: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass that `asdict` writes, of a pydantic model, or of a union of models.

    The texts below the fields are the descriptions of the keys. A dataclass has no other keys than its fields; keys of
    a model whose default is `ABSENT` may be left out.

    Args:
        whole: whether all keys of a dataclass are there; else those with a default may be left out.
    """
    schema: dict[str, Any] = TypeAdapter(kind).json_schema()
    if is_dataclass(kind):
        for each in _dataclasses_of(kind):
            part = schema if each is kind else schema["$defs"][each.__name__]
            part["description"] = (each.__doc__ or "").partition("\n")[0]
            part["required"] = [f.name for f in fields(each) if whole or f.default is f.default_factory is MISSING]
            part["additionalProperties"] = False
            for name, text in _texts(each):
                part["properties"][name]["description"] = text[:1].upper() + text[1:]
    else:
        for part in (schema, *schema.get("$defs", {}).values()):
            for each in part.get("properties", {}).values():
                if each.get("default", MISSING) is None and {"type": "null"} not in each.get("anyOf", []):
                    del each["default"]
    return schema


def _texts(kind: Any) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass and of its bases, with the texts below them."""
    if is_dataclass(kind):
        yield from field_texts(kind).items()  # type: ignore[arg-type]


def _dataclasses_of(kind: Any) -> Iterator[Any]:
    """A dataclass, and those that its fields have."""
    yield kind
    for hint in get_type_hints(kind).values():
        for each in (hint, *get_args(hint)):
            if is_dataclass(each):
                yield from _dataclasses_of(each)
