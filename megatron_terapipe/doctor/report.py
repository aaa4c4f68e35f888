"""The report of an examination: the table of all checks, and its findings as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from megatron_terapipe.console import output_console
from megatron_terapipe.doctor import host_checks, network_checks
from megatron_terapipe.doctor.facts import Examined, Host, Launching, Link
from megatron_terapipe.doctor.findings import Check, Finding, Level, counted, listed, merged
from megatron_terapipe.doctor.host_checks import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CHECKS: tuple[tuple[str, Check], ...] = (
    ("reach", host_checks.reached),
    ("launcher", host_checks.launchers),
    ("hostfile", host_checks.one_machine),
    ("directory", host_checks.directory),
    ("python", host_checks.python),
    ("project", host_checks.project),
    ("packages", host_checks.packages),
    ("imports", host_checks.imports),
    ("cuda", host_checks.cuda),
    ("slots", host_checks.slots),
    ("cores", host_checks.cores),
    ("device memory", host_checks.device_memory),
    ("device kinds", host_checks.device_kinds),
    ("memory", host_checks.memory),
    ("shared memory", host_checks.shared_memory),
    ("limits", host_checks.limits),
    ("deepspeed_env", network_checks.environment_file),
    ("variables", network_checks.variables),
    ("variables", network_checks.cuda_variables),
    ("threads", network_checks.threads),
    ("interfaces", network_checks.interfaces),
    ("names", network_checks.names),
    ("meeting", network_checks.meeting),
    ("links", network_checks.links),
    ("disk", host_checks.disk),
    ("shared disk", host_checks.shared_disk),
    ("clocks", host_checks.clocks),
)
"""All checks by name, in the order in which a launch needs them."""


def findings(examined: Examined) -> tuple[Finding, ...]:
    """Return the findings of all checks, errors first."""
    return merged(replace(finding, check=name) for name, check in CHECKS for finding in check(examined))


SCHEMA_VERSION: Final = 2


@dataclass(frozen=True, kw_only=True)
class Document:
    """Output of `terapipe doctor --json`."""

    __pydantic_config__ = {"use_attribute_docstrings": True, "extra": "forbid"}  # noqa: RUF012 - of its JSON Schema

    schema_version: Literal[2] = SCHEMA_VERSION
    """Version of the document: raised when a key is removed or changes its meaning."""
    errors: int
    """Number of errors: they keep a run from starting or from being right."""
    warnings: int
    """Number of warnings: they make a run slow or fragile."""
    passed: int
    """Number of checks that passed."""
    findings: tuple[Finding, ...]
    """All findings, errors first."""
    launching: Launching
    """The machine on which the doctor ran."""
    hosts: tuple[Host, ...]
    """Hosts in the order of the hostfile, with all facts."""
    links: tuple[Link, ...]
    """Attempts to reach one host from another."""


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
    return asdict(found)


def count(findings: Sequence[Finding], level: Level) -> int:
    """Return the number of findings of a level, each counted for each of its hosts."""
    return sum(max(1, len(each.hosts)) for each in findings if each.level is level)


COLUMNS = ("devices", "cores", "memory free", "disk free", "Python", "torch", "deepspeed", "clock", "next host")
"""Columns of the table of hosts, after host, level and slots."""

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.OK: "green"}


def print_examination(
    examined: Examined, findings: Sequence[Finding], *, verbose: bool, console: "Console | None" = None
) -> None:
    """Print the hosts, errors, warnings, and the number of checks that passed.

    Args:
        console: None = standard output, as wide as the terminal.
    """
    from rich.markup import escape
    from rich.table import Table

    console = console or output_console()
    console.print(_hosts(examined, findings), highlight=False)
    shown = [each for each in findings if verbose or each.level is not Level.OK]
    if shown:
        console.print()
        lines = Table.grid(padding=(0, 2))
        for each in shown:
            where = listed(each.hosts) or "all"
            lines.add_row(f"[{STYLES[each.level]}]{each.level}[/]", *map(escape, (where, each.check, each.line)))
        console.print(lines, highlight=False)
    console.print()
    console.print(summary(findings), markup=False, highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of errors, warnings and checks that passed, in one line."""
    errors, warnings, passed = (count(findings, level) for level in (Level.ERROR, Level.WARNING, Level.OK))
    faults = [counted(number, word) for number, word in ((errors, "error"), (warnings, "warning")) if number]
    return ", ".join([*faults, f"{counted(passed, 'check')} passed"])


def _hosts(examined: Examined, findings: Sequence[Finding]) -> "Table":
    """Return the table of hosts, without columns that are empty."""
    from rich.markup import escape
    from rich.table import Table

    rows = [_cells(host, examined, findings) for host in examined.hosts]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(escape(row[name]) for name in names))
    return table


def _cells(host: Host, examined: Examined, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the texts of a row, by column."""
    level = next((each.level for each in findings if host.name in each.hosts), Level.OK)
    row = {"host": host.name, "": str(level), "slots": "" if host.slots is None else str(host.slots)}
    if host.facts is None:
        return row | dict.fromkeys(COLUMNS, "")
    facts, versions = host.facts, host.facts.software.packages if host.facts.software.python is not None else {}
    devices = [each.name for each in facts.devices]
    clock = "" if host.clock is None else f"{host.clock.offset_s:+.3f} s"
    trips = [each.round_trip_s for each in examined.links if each.source == host.name and not each.is_meeting]
    cells = (
        listed(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        str(facts.resources.cores),
        f"{facts.resources.free_memory_bytes / GIB:.0f} GiB",
        f"{facts.folder.free_bytes / 1e9:.0f} GB",
        facts.software.python_version,
        versions.get("torch", ""),
        versions.get("deepspeed", ""),
        clock,
        "".join(f"{1e6 * seconds:.0f} us" for seconds in trips if seconds is not None),
    )
    return row | dict(zip(COLUMNS, cells, strict=True))
