"""The report of an examination: all checks, in the order in which a launch meets them; as JSON and as a table."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.doctor import host_checks, network_checks
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
from megatron_terapipe.doctor.findings import Finding, Level, counted, merged, some
from megatron_terapipe.doctor.host_checks import GIB
from megatron_terapipe.doctor.network_checks import gigabits

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Check = Callable[[Examined], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    host_checks.reached,
    host_checks.launchers,
    host_checks.one_machine,
    host_checks.folders,
    host_checks.packages,
    host_checks.apex,
    host_checks.imports,
    host_checks.drivers,
    host_checks.slots,
    host_checks.free_devices,
    host_checks.memory,
    host_checks.limits,
    network_checks.environment_file,
    network_checks.not_handed_on,
    network_checks.differences,
    network_checks.cuda,
    network_checks.threads,
    network_checks.interfaces,
    network_checks.names,
    network_checks.looked_up,
    network_checks.ports,
    network_checks.outgoing_ports,
    network_checks.links,
    network_checks.routes,
    host_checks.folder,
    host_checks.shared,
    host_checks.clocks,
)


def findings(examined: Examined) -> tuple[Finding, ...]:
    """Return what all checks found, worst first."""
    return merged(finding for check in CHECKS for finding in check(examined))


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


WIDTH_OF_FILES = 1000
"""Letters of a line where no terminal ends it."""

DROPPED_FIRST = ("disk free", "Python", "cores", "clock")
"""Columns that a narrow terminal does without, in this order; the JSON has them."""

WRAPPED = ("host", "devices", "next host")

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.OK: "green"}


def print_examination(
    examined: Examined, findings: Sequence[Finding], *, verbose: bool, console: "Console | None" = None
) -> None:
    """Print the hosts, errors, warnings, and how many checks passed.

    Args:
        findings: what is said of them, worst first.
        verbose: whether to print what passed, too.
        console: where; None = standard output, as wide as the terminal.
    """
    from rich.console import Console
    from rich.table import Table

    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH_OF_FILES)
    console.print(_hosts(examined, findings, console), highlight=False)
    listed = [each for each in findings if verbose or each.level is not Level.OK]
    if listed:
        console.print()
        lines = Table.grid(padding=(0, 2))
        for each in listed:
            where = some(each.hosts) or "all"
            lines.add_row(f"[{STYLES[each.level]}]{each.level}[/]", *map(_escaped, (where, each.check, each.line)))
        console.print(lines, highlight=False)
    console.print()
    console.print(summary(findings), markup=False, highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of errors, warnings and checks that passed in one line."""
    counts = {level: count(tuple(findings), level) for level in Level}
    parts = [counted(counts[Level.ERROR], "error"), counted(counts[Level.WARNING], "warning")]
    passed = f"{counted(counts[Level.OK], 'check')} passed"
    return ", ".join([*(part for part in parts if not part.startswith("0 ")), passed])


def _hosts(examined: Examined, findings: Sequence[Finding], console: "Console") -> "Table":
    """Return a row for each host, with as many columns as fit the terminal."""
    from rich.table import Table

    rows = [_cells(host, examined, findings) for host in examined.hosts]
    unbounded = console.options.update(max_width=WIDTH_OF_FILES)
    for num_dropped in range(len(DROPPED_FIRST) + 1):
        dropped = DROPPED_FIRST[:num_dropped]
        names = [name for name in rows[0] if name not in dropped and any(row[name] for row in rows)]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, no_wrap=name not in WRAPPED)
        for row in rows:
            table.add_row(*(_escaped(row[name]) for name in names))
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _cells(host: Host, examined: Examined, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the texts of a row, by column."""
    worst = next((each.level for each in findings if host.name in each.hosts), Level.OK)
    row = {"host": host.name, "": str(worst), "slots": "" if host.slots is None else str(host.slots)}
    facts = host.facts
    devices = [] if facts is None else [each.name for each in facts.devices]
    versions = {} if facts is None or facts.software.python is None else facts.software.packages
    return row | {
        "devices": some(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "cores": "" if facts is None else str(facts.resources.cores),
        "memory free": "" if facts is None else f"{facts.resources.free_memory_bytes / GIB:.0f} GiB",
        "disk free": "" if facts is None else f"{facts.folder.free_bytes / 1e9:.0f} GB",
        "Python": "" if facts is None else facts.software.python_version,
        **{name: versions.get(name, "") for name in ("torch", "deepspeed")},
        "clock": "" if host.clock is None or len(examined.hosts) < 2 else f"{host.clock.offset_s:+.3f} s",
        "next host": next(_measured(host, examined.links), ""),
    }


def _measured(host: Host, links: Sequence[Link]) -> Iterator[str]:
    for link in links:
        if link.source == host.name and link.bandwidth is not None:
            yield f"{gigabits(link.bandwidth)}, {1e6 * (link.round_trip_s or 0):.0f} us"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
