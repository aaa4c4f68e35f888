"""Findings of checks: good, doubtful or wrong, each with its remedy."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps

from megatron_terapipe.doctor.facts import Examined, Host, HostFacts


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
    check: str = ""
    """Name of the check."""
    hosts: tuple[str, ...] = ()
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


Check = Callable[[Examined], Iterator[Finding]]
"""Yields a finding for everything that it looked at, without the name of the check."""

Verdict = Finding | str | None
"""About one host: what is wrong, or a good value, or nothing to be looked at."""


def ok(found: str, host: str | None = None) -> Finding:
    """Return that something is as it should be, on a host or (None) in the launch as a whole."""
    return Finding(level=Level.OK, hosts=() if host is None else (host,), found=found)


def warning(found: str, rule: str, remedy: str, host: str | None = None) -> Finding:
    """Return that something makes a run slow or fragile."""
    return replace(ok(found, host), level=Level.WARNING, rule=rule, remedy=remedy)


def error(found: str, rule: str, remedy: str, host: str | None = None) -> Finding:
    """Return that something keeps a run from starting, or from being right."""
    return replace(warning(found, rule, remedy, host), level=Level.ERROR)


def on_each_host(judge: Callable[[Examined, Host, HostFacts], Verdict | Iterable[Verdict]]) -> Check:
    """Return the check of all hosts whose probe answered, from a function that judges one of them."""

    @wraps(judge)
    def check(examined: Examined) -> Iterator[Finding]:
        for host, facts in examined.reached:
            verdicts = judge(examined, host, facts)
            for each in [verdicts] if verdicts is None or isinstance(verdicts, Finding | str) else verdicts:
                if each is not None:
                    yield ok(each, host.name) if isinstance(each, str) else replace(each, hosts=(host.name,))

    return check


def same(what: str, values: Mapping[str, str | None], remedy: str, level: Level = Level.ERROR) -> Iterator[Finding]:
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
        yield ok(f"{what} {value} on all hosts" if value is not None else f"no {what} on any host")
        return
    listed = "; ".join(f"{value or 'none'} on {some(names)}" for value, names in hosts.items())
    yield replace(error(f"{what} {listed}", "must be the same on all hosts", remedy), level=level)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings, worst first, those that several hosts share as one."""
    hosts: dict[Finding, list[str]] = {}
    for each in findings:
        hosts.setdefault(replace(each, hosts=()), []).extend(each.hosts)
    found = [replace(each, hosts=tuple(dict.fromkeys(names))) for each, names in hosts.items()]
    return tuple(sorted(found, key=lambda each: list(Level).index(each.level)))


def some(words: Iterable[str], most: int = 4) -> str:
    """Return words with commas between them: some of them, and the number of the rest."""
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(number: int, word: str) -> str:
    """Return a number of things in words, such as `2 ranks`."""
    return f"{number} {word}{'' if number == 1 else 's'}"
