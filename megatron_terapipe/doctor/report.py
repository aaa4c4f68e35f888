"""The report of an examination: the table of all checks, and its findings as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from megatron_terapipe.doctor import host_checks, network_checks
from megatron_terapipe.doctor.facts import Examined, Host, Launching, Link
from megatron_terapipe.doctor.findings import Check, Finding, Level, counted, merged, some
from megatron_terapipe.doctor.host_checks import GIB
from megatron_terapipe.doctor.network_checks import gigabits

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
    ("apex", host_checks.apex),
    ("imports", host_checks.imports),
    ("cuda", host_checks.cuda),
    ("toolkit", host_checks.toolkit),
    ("nccl", host_checks.nccl),
    ("slots", host_checks.slots),
    ("cores", host_checks.cores),
    ("device memory", host_checks.device_memory),
    ("device kinds", host_checks.device_kinds),
    ("memory", host_checks.memory),
    ("shared memory", host_checks.shared_memory),
    ("open files", host_checks.open_files),
    ("processes", host_checks.processes),
    ("locked memory", host_checks.locked_memory),
    ("deepspeed_env", network_checks.environment_file),
    ("variables", network_checks.variables),
    ("variables", network_checks.cuda_variables),
    ("threads", network_checks.threads),
    ("interfaces", network_checks.interfaces),
    ("names", network_checks.names),
    ("lookup", network_checks.lookup),
    ("meeting", network_checks.meeting),
    ("ports", network_checks.ports),
    ("bandwidth", network_checks.bandwidth),
    ("round trip", network_checks.round_trip),
    ("route", network_checks.route),
    ("disk", host_checks.disk),
    ("shared disk", host_checks.shared_disk),
    ("clocks", host_checks.clocks),
)
"""All checks by name, in the order in which a launch meets them."""


def findings(examined: Examined) -> tuple[Finding, ...]:
    """Return the findings of all checks, worst first."""
    return merged(replace(finding, check=name) for name, check in CHECKS for finding in check(examined))


SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Document:
    """What `terapipe doctor --json` writes."""

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
    return asdict(found)


def count(findings: Sequence[Finding], level: Level) -> int:
    """Return the checks that came to a level: one for each host that a finding names."""
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
        console: where; None = standard output, as wide as the terminal.
    """
    from rich.console import Console
    from rich.markup import escape
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
            lines.add_row(f"[{STYLES[each.level]}]{each.level}[/]", *map(escape, (where, each.check, each.line)))
        console.print(lines, highlight=False)
    console.print()
    console.print(summary(findings), markup=False, highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of errors, warnings and checks that passed in one line."""
    errors, warnings, passed = (count(findings, level) for level in (Level.ERROR, Level.WARNING, Level.OK))
    faults = [counted(number, word) for number, word in ((errors, "error"), (warnings, "warning")) if number]
    return ", ".join([*faults, f"{counted(passed, 'check')} passed"])


def _hosts(examined: Examined, findings: Sequence[Finding], console: "Console") -> "Table":
    """Return a row for each host, with as many columns as fit the terminal."""
    from rich.markup import escape
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
            table.add_row(*(escape(row[name]) for name in names))
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _cells(host: Host, examined: Examined, findings: Sequence[Finding]) -> dict[str, str]:
    """Return the texts of a row, by column."""
    worst = next((each.level for each in findings if host.name in each.hosts), Level.OK)
    row = {"host": host.name, "": str(worst), "slots": "" if host.slots is None else str(host.slots)}
    facts, several = host.facts, len(examined.hosts) > 1
    devices = [] if facts is None else [each.name for each in facts.devices]
    versions = {} if facts is None or facts.software.python is None else facts.software.packages
    sent = [link for link in examined.links if link.source == host.name and link.bandwidth is not None]
    speeds = [f"{gigabits(link.bandwidth or 0)}, {1e6 * (link.round_trip_s or 0):.0f} us" for link in sent]
    return row | {
        "devices": some(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "cores": "" if facts is None else str(facts.resources.cores),
        "memory free": "" if facts is None else f"{facts.resources.free_memory_bytes / GIB:.0f} GiB",
        "disk free": "" if facts is None else f"{facts.folder.free_bytes / 1e9:.0f} GB",
        "Python": "" if facts is None else facts.software.python_version,
        "torch": versions.get("torch", ""),
        "deepspeed": versions.get("deepspeed", ""),
        "clock": f"{host.clock.offset_s:+.3f} s" if host.clock is not None and several else "",
        "next host": "".join(speeds[:1]),
    }
