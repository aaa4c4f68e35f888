"""What a check says of hosts: good, doubtful or wrong, and then what mends it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: an error keeps a run from starting or from being right, a warning makes it slow or fragile."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found where."""

    level: Level
    """How bad it is."""
    check: str
    """Name of what was looked at."""
    hosts: tuple[str, ...]
    """Where; empty = it concerns the launch as a whole."""
    found: str
    """The value."""
    rule: str = ""
    """What it should be; empty if it is."""
    remedy: str = ""
    """What mends it; empty if nothing has to be."""

    @property
    def line(self) -> str:
        """Value, rule and remedy in one line."""
        return ": ".join(part for part in ("; ".join(filter(None, (self.found, self.rule))), self.remedy) if part)


def ok(check: str, host: str | None, found: str) -> Finding:
    """Return that something is as it should be.

    Args:
        host: where; None = the launch as a whole.
    """
    return Finding(level=Level.OK, check=check, hosts=_hosts(host), found=found)


def warning(check: str, host: str | None, found: str, rule: str, remedy: str) -> Finding:
    """Return that something makes a run slow or fragile.

    Args:
        host: where; None = the launch as a whole.
    """
    return Finding(level=Level.WARNING, check=check, hosts=_hosts(host), found=found, rule=rule, remedy=remedy)


def error(check: str, host: str | None, found: str, rule: str, remedy: str) -> Finding:
    """Return that something keeps a run from starting, or from being right.

    Args:
        host: where; None = the launch as a whole.
    """
    return replace(warning(check, host, found, rule, remedy), level=Level.ERROR)


def same(
    check: str, what: str, values: Mapping[str, str | None], remedy: str, level: Level = Level.ERROR
) -> Iterator[Finding]:
    """Yield whether hosts have the same of something, naming the hosts of each value; nothing for one host.

    Args:
        values: of each host; None = it has none.
    """
    if len(values) < 2:
        return
    hosts: dict[str | None, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    if len(hosts) == 1:
        (value,) = hosts
        yield ok(check, None, f"{what} {value} on all hosts" if value is not None else f"no {what} on any host")
        return
    listed = "; ".join(f"{value or 'none'} on {some(names)}" for value, names in hosts.items())
    yield replace(error(check, None, f"{what} {listed}", "must be the same on all hosts", remedy), level=level)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, worst first, those that several hosts share as one."""
    hosts: dict[Finding, list[str]] = {}
    for each in findings:
        hosts.setdefault(replace(each, hosts=()), []).extend(each.hosts)
    found = [replace(each, hosts=tuple(dict.fromkeys(names))) for each, names in hosts.items()]
    return tuple(sorted(found, key=lambda each: list(Level).index(each.level)))


def some(words: Iterable[str], most: int = 4) -> str:
    """Return words with commas between them, at most some.

    Args:
        most: how many are listed before the rest is counted.
    """
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(number: int, word: str) -> str:
    """Return a number of things in words, such as `2 ranks`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _hosts(host: str | None) -> tuple[str, ...]:
    return () if host is None else (host,)
