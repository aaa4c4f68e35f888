"""Hostfiles, read as DeepSpeed's launcher reads them (`_parse_hostfile` in deepspeed/launcher/runner.py, 0.19.8).

A line is a host, blanks, `slots=` and a number without blanks between. Words after the number are ignored, such as
`max_slots=16` of Open MPI. A line that begins with `#` is a comment; `#` elsewhere is none. A host may have no slots.
DeepSpeed takes any word for a host, also one that ssh reads as an option; here it must be a host name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from megatron_terapipe.config.parsing import check_host_name, short
from megatron_terapipe.errors import ConfigError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(.*)")
_YAML = re.compile(r"-\s|[\w-]+:(\s|$)")
_NOT_HOSTFILES = (".json", ".yaml", ".yml")

MOST_SLOTS = 1024
"""Devices of a host, at most: more would be a typing error."""


@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int
    """Its devices; 0 = none of them are used."""
    ignored: str = ""
    """Rest of the line."""


def is_hostfile(text: str, path: str = "") -> bool:
    """Whether a file is a hostfile, or was meant to be one, so that errors are about hostfiles."""
    first = next((line for _, line in _lines(text)), "")
    if _LINE.match(first):
        return True
    others = text.lstrip()[:1] in ("{", "[") or PurePath(path).suffix.lower() in _NOT_HOSTFILES
    return bool(first) and not others and _YAML.match(first) is None


def parse_hostfile(text: str, file: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile in its order."""
    hosts: dict[str, Host] = {}
    for number, line in _lines(text):
        match = _LINE.match(line)
        if match is None:
            raise ConfigError(
                f"{file}: line {number} of the hostfile, {short(line)}, is not HOST slots=N as DeepSpeed reads it: "
                "write so, N being its devices; a cluster file is JSON, or YAML with the ending .yaml"
            )
        where = f"{file}: line {number} of the hostfile"
        check_host_name(match[1], where)
        if match[1] in hosts:
            raise ConfigError(f"{where} names host {match[1]} again: keep one line")
        # The length first: Python does not read numbers of thousands of digits.
        if len(match[2].lstrip("0")) > 9 or int(match[2]) > MOST_SLOTS:
            more = f"has {short(match[2])} slots, more than {MOST_SLOTS}"
            raise ConfigError(f"{where} {more}: give the devices of the host")
        hosts[match[1]] = Host(match[1], int(match[2]), match[3].strip())
    if not hosts:
        raise ConfigError(f"{file} is a hostfile that names no host: write a line HOST slots=N for each")
    if not any(host.slots for host in hosts.values()):
        raise ConfigError(f"{file} is a hostfile without slots: write a line HOST slots=N for each host, N from 1")
    return tuple(hosts.values())


def hostfile_notes(hosts: Iterable[Host]) -> tuple[str, ...]:
    """Return notes about words of a hostfile without effect, a line each."""
    hosts = tuple(hosts)
    unused = [host.name for host in hosts if not host.slots]
    notes = [f"hosts without slots are not used: {_some(unused)}"] if unused else []
    ignored = list(dict.fromkeys(host.ignored for host in hosts if host.ignored and not host.ignored.startswith("#")))
    if ignored:
        notes.append(f"the hostfile has {_some(ignored)} after the slots of a host, which DeepSpeed ignores")
    return tuple(notes)


def hostfile_text(hosts: Iterable[Host]) -> str:
    """Return the hostfile of hosts, in their order."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    """Yield the lines that are neither empty nor comments, and their numbers from 1."""
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if content and not content.startswith("#"):
            yield number, content


def _some(words: list[str]) -> str:
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
