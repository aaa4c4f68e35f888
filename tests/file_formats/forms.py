"""Files held against the schemas of `terapipe schema`, and readers held against the same schemas."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from jsonschema import Draft202012Validator

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.file_formats.table import FILE_FORMATS

OTHERS: tuple[Any, ...] = (None, True, "x", -1, 7, 0.5, [], ["x"], {})
"""Values that replace each value of a file in turn."""


def validate(name: str, document: Any) -> None:
    """Raise if a document, or the JSON text of one, is none of a kind of file."""
    schema = FILE_FORMATS[name].json_schema()
    Draft202012Validator.check_schema(schema)
    found = json.loads(document) if isinstance(document, str) else json.loads(json.dumps(document))
    Draft202012Validator(schema).validate(found)


def others_of(document: Any) -> Iterator[Any]:
    """Yield documents that differ in one place: a key less, an unknown key, or another value."""
    if isinstance(document, dict):
        yield {**document, "colour": "red"}
        for name in document:
            yield {key: value for key, value in document.items() if key != name}
    places = (
        list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else []
    )
    for place in places:
        inside = others_of(document[place])
        for value in (*OTHERS, *inside):
            other = deepcopy(document)
            other[place] = value
            yield other


def check_reader(name: str, document: Any, read: Callable[[str], object], *, relations: tuple[str, ...] = ()) -> None:
    """Raise if a reader and a schema disagree about a document or others like it.

    Args:
        name: kind of file.
        document: one of that kind, with all keys.
        read: reads the text of one, and raises a `UserError` for others.
        relations: parts of messages about values that do not go with others, which a schema cannot express.
    """
    schema = Draft202012Validator(FILE_FORMATS[name].json_schema())
    assert schema.is_valid(document)
    read(json.dumps(document))
    taken = 0
    for other in others_of(document):
        try:
            read(json.dumps(other))
        except UserError as error:
            known = any(part in str(error) for part in relations)
            assert known or not schema.is_valid(other), f"only the reader refuses {other}: {error}"
        else:
            taken += 1
            assert schema.is_valid(other), f"only the schema refuses {other}"
    assert taken, "no other document is read"
