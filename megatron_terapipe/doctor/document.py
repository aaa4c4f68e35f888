"""The JSON of an examination, and its schema."""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from deepspeed_ext.plan.text.field_texts import field_texts
from megatron_terapipe.doctor.facts import (
    Clock,
    Device,
    Examined,
    Folder,
    Host,
    HostFacts,
    Imports,
    Interface,
    Launching,
    Link,
    Names,
    Resources,
    Software,
)
from megatron_terapipe.doctor.findings import Finding, Level

SCHEMA_VERSION: Final = 1

_DATACLASSES = (
    *(Clock, Device, Finding, Folder, Host, HostFacts, Imports, Interface, Launching, Link, Names, Resources, Software),
)


class Document(BaseModel):
    """What `terapipe doctor --json` writes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    """Form of the document: raised when a key goes away or changes its meaning."""
    errors: int
    """Findings that keep a run from starting, or from being right."""
    warnings: int
    """Findings that make a run slow or fragile."""
    passed: int
    """Findings that are as they should be."""
    findings: tuple[Finding, ...]
    """All of them, worst first."""
    launching: Launching
    """The machine where the doctor ran."""
    hosts: tuple[Host, ...]
    """In the order of the hostfile, with all facts."""
    links: tuple[Link, ...]
    """Tries to reach one host from another."""


def document(examined: Examined, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Return an examination as JSON."""
    found = Document(
        errors=count(findings, Level.ERROR),
        warnings=count(findings, Level.WARNING),
        passed=count(findings, Level.OK),
        findings=findings,
        launching=examined.launching,
        hosts=examined.hosts,
        links=examined.links,
    )
    return found.model_dump(mode="json")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of these documents, each field with its meaning."""
    schema = TypeAdapter(Document).json_schema(mode="serialization")
    for kind in _DATACLASSES:
        described = schema["$defs"][kind.__name__]
        described["description"] = (kind.__doc__ or "").partition("\n")[0]
        for name, text in field_texts(kind).items():
            described["properties"][name]["description"] = text
    return schema


def count(findings: tuple[Finding, ...], level: Level) -> int:
    """Return how many checks came to a level: one for each host that a finding names."""
    return sum(max(1, len(each.hosts)) for each in findings if each.level is level)
