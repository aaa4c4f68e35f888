"""What tables say of JSON Schemas."""

from typing import Any

import pytest

from docs.extensions.json_schemas import meaning, rows_of, type_words


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer", "minimum": 1, "maximum": 1024}, "integer, at least 1, at most 1,024"),
        ({"type": "integer", "minimum": -(10**15)}, "integer"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Link"}, {"type": "null"}]}, "string or Link"),
        ({"type": ["number", "null"]}, "number"),
        ({"enum": ["none", 3]}, '"none" or 3'),
        ({"const": "end"}, '"end"'),
        ({"type": "array", "items": {"type": "number"}}, "array of number"),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/Part"}}, "object of Part"),
        ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}, "[string, number]"),
        ({}, "any value"),
    ],
)
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_words(schema) == words


def test_rows() -> None:
    schema = {
        "required": ["a"],
        "properties": {"a": {"type": "string"}, "b": {"type": "number", "default": 0, "description": "seconds"}},
    }
    assert rows_of(schema) == [("a", "string", "required", ""), ("b", "number", "0", "seconds")]


def test_a_meaning_may_be_that_of_a_form() -> None:
    assert meaning({"anyOf": [{"type": "string", "description": "A memory."}, {"type": "null"}]}) == "A memory."
