"""Hostfiles: a line `host slots=8` for each node, as DeepSpeed's launcher reads them, and back."""

import re
from collections.abc import Iterable

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster.machine import Node
from megatron_terapipe.search.reading import short

_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def is_hostfile(text: str) -> bool:
    """Whether the first line that says something is one of a hostfile."""
    lines = [_without_comment(line) for line in text.splitlines()]
    first = next((line for line in lines if line), "")
    return _LINE.fullmatch(first) is not None


def parse_hostfile(text: str, file: str) -> list[tuple[str, int]]:
    """Read host names and slots, in the order of the file.

    Raises:
        ConfigError: if a line is not understood, a host stands twice or has no slots, or there is none.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = _without_comment(line)
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise ConfigError(f"{file}: line {number} {short(content)} is not a line of a hostfile: write HOST slots=N")
        if match[1] in hosts:
            raise ConfigError(f"{file}: line {number} names host {match[1]} again: keep one of its lines")
        if int(match[2]) < 1:
            raise ConfigError(f"{file}: line {number} gives host {match[1]} no slots: give 1 or more, or drop the line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(f"{file} names no host: write a line HOST slots=N for each")
    return list(hosts.items())


def hostfile_text(nodes: Iterable[Node]) -> str:
    """The hostfile of nodes, in their order."""
    return "".join(f"{node.name} slots={node.num_devices}\n" for node in nodes)


def _without_comment(line: str) -> str:
    return line.partition("#")[0].strip()
