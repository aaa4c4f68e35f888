"""Findings of checks: passed, warning or error, with a remedy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps

from megatron_terapipe.doctor.facts import Examined, Host, HostFacts


class Level(StrEnum):
    """Level of a finding: an error keeps a run from starting or being right, a warning makes it slow or fragile."""

    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check on some hosts."""

    level: Level
    """Level of the finding."""
    check: str = ""
    """Name of the check."""
    hosts: tuple[str, ...] = ()
    """Hosts that it concerns; empty = the launch as a whole."""
    found: str
    """Value that was found."""
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
