"""Files of runs, checkpoints and data, and what commands on data and models answer with `--json`."""

from typing import Annotated, Any

from pydantic import Field

from deepspeed_ext.runtime.health.stall import LedgerFile
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import FileFacts
from megatron_terapipe.data.preprocess import Written
from megatron_terapipe.data.tokenizer_checks import TokenizerRecord
from megatron_terapipe.file_formats.class_schema import ABSENT, dataclass_schema, description_schema
from megatron_terapipe.search.answer.json_schema import Part

_SHA256 = "^[0-9a-f]{64}$"


class ManifestFile(Part):
    """The manifest of a checkpoint."""

    files: dict[str, FileFacts]
    """Size in bytes and SHA-256 of every other file of the checkpoint, by its name."""
    sha256: Annotated[str, Field(pattern=_SHA256)]
    """SHA-256 of `files`: of its JSON with sorted keys and without blanks."""


def ledger_schema() -> dict[str, Any]:
    """Return the JSON Schema of `rank_00000.json`."""
    return dataclass_schema(LedgerFile)


def manifest_schema() -> dict[str, Any]:
    """Return the JSON Schema of `manifest.json`."""
    schema = description_schema(ManifestFile)
    size, sha256 = schema["$defs"]["FileFacts"]["prefixItems"]
    size |= {"minimum": 0}
    sha256 |= {"pattern": _SHA256}
    return schema


def run_schema() -> dict[str, Any]:
    """Return the JSON Schema of `run.json`. Earlier versions did not write all of its keys."""
    return dataclass_schema(CheckpointInfo, whole=False)


def tokenizer_schema() -> dict[str, Any]:
    """Return the JSON Schema of `PREFIX.tokenizer.json`."""
    return dataclass_schema(TokenizerRecord)


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
