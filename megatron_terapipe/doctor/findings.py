"""Findings of checks: passed, warning or error, with a remedy; their report, as JSON and as a table."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal

from megatron_terapipe.console import output_console
from megatron_terapipe.doctor.facts import Examined, Host, HostFacts, Launching, Link

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIB = 2**30


class Level(StrEnum):
    """Level of a finding: an error keeps a run from starting or being right, a warning makes it slow or fragile."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check on some hosts."""

    level: Level
    check: str = ""
    hosts: tuple[str, ...] = ()
    """Hosts that it concerns; empty = the launch as a whole."""
    found: str
    rule: str = ""
    """Rule that the value breaks; empty if it breaks none."""
    remedy: str = ""
    """How to fix it; empty if the check passed."""

    @property
    def line(self) -> str:
        """Value, rule and remedy in one line."""
        return ": ".join(part for part in ("; ".join(filter(None, (self.found, self.rule))), self.remedy) if part)


Check = Callable[[Examined], Iterator[Finding]]
"""Yields findings, without the name of the check."""

Verdict = Finding | str | None
"""Result for one host: a finding, a good value, or None where the check does not apply."""


def ok(found: str, host: str | None = None) -> Finding:
    """Return the finding of a check that passed on a host, or (None) for the launch as a whole."""
    return Finding(level=Level.OK, hosts=() if host is None else (host,), found=found)


def warning(found: str, rule: str, remedy: str, host: str | None = None) -> Finding:
    """Return the finding of a check whose failure makes a run slow or fragile."""
    return replace(ok(found, host), level=Level.WARNING, rule=rule, remedy=remedy)


def error(found: str, rule: str, remedy: str, host: str | None = None) -> Finding:
    """Return the finding of a check whose failure keeps a run from starting or from being right."""
    return replace(warning(found, rule, remedy, host), level=Level.ERROR)


def on_each_host(check_host: Callable[[Examined, Host, HostFacts], Verdict | Iterable[Verdict]]) -> Check:
    """Return the check of all hosts that answered, from the check of one host."""

    @wraps(check_host)
    def check(examined: Examined) -> Iterator[Finding]:
        for host, facts in examined.reached:
            verdicts = check_host(examined, host, facts)
            for each in [verdicts] if verdicts is None or isinstance(verdicts, Finding | str) else verdicts:
                if each is not None:
                    yield ok(each, host.name) if isinstance(each, str) else replace(each, hosts=(host.name,))

    return check


def same(name: str, values: Mapping[str, str | None], remedy: str, level: Level = Level.ERROR) -> Iterator[Finding]:
    """Yield whether a value is the same on all hosts, with the hosts of each value; no finding for one host.

    Args:
        name: of the value.
        values: by host; None = the host has none.
    """
    if len(values) < 2:
        return
    hosts: dict[str | None, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        (value,) = hosts
        yield ok(f"{name} {value} on all hosts" if value is not None else f"no {name} on any host")
        return
    found = "; ".join(f"{value or 'none'} on {listed(names)}" for value, names in hosts.items())
    yield replace(error(f"{name} {found}", "must be the same on all hosts", remedy), level=level)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, errors first, equal findings of several hosts as one."""
    hosts: dict[Finding, list[str]] = {}
    for each in findings:
        hosts.setdefault(replace(each, hosts=()), []).extend(each.hosts)
    found = [replace(each, hosts=tuple(dict.fromkeys(names))) for each, names in hosts.items()]
    return tuple(sorted(found, key=lambda each: list(Level).index(each.level)))


def listed(words: Iterable[str], most: int = 4) -> str:
    """Return words separated by commas: the first ones, and the number of the others."""
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(number: int, word: str) -> str:
    """Return a number and a noun, such as `2 ranks`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


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
    launching: Launching
    hosts: tuple[Host, ...]
    """Hosts in the order of the hostfile, with all facts."""
    links: tuple[Link, ...]


def document(examined: Examined, findings: tuple[Finding, ...]) -> dict[str, Any]:
    """Return an examination as JSON."""
    errors, warnings, passed = (count(findings, level) for level in (Level.ERROR, Level.WARNING, Level.OK))
    facts: dict[str, Any] = {"launching": examined.launching, "hosts": examined.hosts, "links": examined.links}
    return asdict(Document(errors=errors, warnings=warnings, passed=passed, findings=findings, **facts))


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
