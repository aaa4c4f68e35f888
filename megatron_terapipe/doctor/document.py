"""The JSON of an examination, and its schema."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megatron_terapipe.doctor.facts import Examined, Host, Launching, Link
from megatron_terapipe.doctor.findings import Finding, Level

VERSION = 1


class Document(BaseModel):
    """What `terapipe doctor --json` writes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    version: int = Field(default=VERSION)
    """Of this format."""
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
    """Return an examination as JSON.

    Args:
        examined: the facts.
        findings: what is said of them.
    """
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
    """Return the JSON Schema of these documents."""
    return TypeAdapter(Document).json_schema(mode="serialization")


def count(findings: tuple[Finding, ...], level: Level) -> int:
    """Return how many checks came to a level: one for each host that a finding names.

    Args:
        findings: all of them.
        level: to count.
    """
    return sum(max(1, len(each.hosts)) for each in findings if each.level is level)
