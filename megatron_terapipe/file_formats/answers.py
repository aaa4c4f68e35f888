"""What commands on data and models answer with `--json`."""

from typing import Any

from megatron_terapipe.data.preprocess import Written
from megatron_terapipe.file_formats.described import ABSENT, dataclass_schema, description_schema
from megatron_terapipe.search.report.schema.schema_parts import Part


class Converted(Part):
    """What `convert` wrote."""

    output: str
    """Directory that was written."""
    source: str
    """Directory that was read."""
    tokenizer_files: list[str] = ABSENT
    """Files of the tokenizer among what was written; of `to-huggingface`."""


class Generated(Part):
    """What `generate` said."""

    prompt: str
    """The prompt, as the model read it."""
    continuation: str
    """The text of the new tokens."""


def preprocessed_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answer of `preprocess`."""
    return dataclass_schema(Written)


def converted_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answer of `convert`."""
    return description_schema(Converted)


def generated_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answer of `generate`."""
    return description_schema(Generated)
