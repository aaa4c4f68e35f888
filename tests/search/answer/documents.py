"""The documents that commands print, read by the classes that write them."""

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_terapipe.search.answer.json_documents import AnyDocument

READER: TypeAdapter[AnyDocument] = TypeAdapter(AnyDocument)


def checked(text: str) -> dict[str, Any]:
    """Return the document of a text; raises if a key is unknown or missing, or a value is of another type."""
    document = json.loads(text)
    READER.validate_python(document)
    assert isinstance(document, dict)
    return document


def read(path: Path) -> dict[str, Any]:
    """Return the document of a file; see `checked`."""
    return checked(path.read_text())
