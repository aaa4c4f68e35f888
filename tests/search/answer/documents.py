"""The documents that commands print, checked against the schema that the search publishes."""

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from megatron_terapipe.search.answer.json_schema import json_schema


def checked(text: str) -> dict[str, Any]:
    """Return the document of a text, and raise if the schema does not describe it."""
    document = json.loads(text)
    Draft202012Validator(json_schema()).validate(document)
    assert isinstance(document, dict)
    return document


def read(path: Path) -> dict[str, Any]:
    """Return the document of a file, and raise if the schema does not describe it."""
    return checked(path.read_text())
