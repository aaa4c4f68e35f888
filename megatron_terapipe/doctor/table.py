"""An examination for people: a row for each host, then what matters first."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_terapipe.doctor.checks.devices import GIB
from megatron_terapipe.doctor.checks.network import gigabits
from megatron_terapipe.doctor.document import count
from megatron_terapipe.doctor.facts import Examined, Host, Link
from megatron_terapipe.doctor.findings import Finding, Level, counted, some

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
