"""Files of a run: the ledgers of its ranks, and what its checkpoints and its data hold beside tensors and tokens."""

from typing import Annotated, Any

from pydantic import Field

from deepspeed_ext.runtime.ledger.ledger_file import LedgerFile
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import FileFacts
from megatron_terapipe.data.tokenizer_record import TokenizerRecord
from megatron_terapipe.file_formats.described import dataclass_schema, description_schema
from megatron_terapipe.search.report.schema.schema_parts import Part

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
