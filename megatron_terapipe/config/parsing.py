"""Parsing of input of users: JSON files, YAML files and the names of hosts.

Launchers pass host names to ssh, pdsh and mpirun, to which other words are options, lists or commands. A host name is
letters, digits and hyphens between dots (RFC 1123, section 2.1), and underscores, which clusters use, or an address.
`user@` may come before it.
"""

import json
import re
from functools import cache
from ipaddress import ip_address
from typing import Any

from deepspeed_ext.plan import text_files
from deepspeed_ext.plan.text_files import MOST_LEVELS, check_values, read_text
from megatron_terapipe.errors import ConfigError, errors_in


def read_json(path: str, flag: str, *, infinite: bool = False, unbounded: bool = False) -> object:
    """Read a JSON file."""
    return parse_json(read_text(path, flag), f"{flag} {path}".lstrip(), infinite=infinite, unbounded=unbounded)


def parse_json(text: str, described: str, *, infinite: bool = False, unbounded: bool = False) -> object:
    """Parse JSON text; see `deepspeed_ext.plan.text_files.parse_json`."""
    with errors_in(""):
        return text_files.parse_json(text, described, infinite=infinite, unbounded=unbounded)


def parse_yaml(text: str, described: str) -> object:
    """Parse YAML text. Dates stay text."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{described} is YAML, and the package for it is missing: pip install pyyaml") from None
    try:
        document = yaml.load(text, Loader=_loader())  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{described} is not YAML ({problem}{line}): fix it") from None
    with errors_in(""):
        check_values(document, described, len(text))
    return document


@cache
def _loader() -> type[Any]:
    """Return the safe loader, with four differences.

    PyYAML keeps the last of two equal keys, makes dates, takes 1e-5 for text (YAML 1.1), and takes a time that grows
    with the square of the nesting.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loads only plain values."""

        levels = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """Read a value, and all values in it."""
            self.levels += 1
            if self.levels > MOST_LEVELS:
                problem = f"it is nested more than {MOST_LEVELS} levels deep"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.levels -= 1
            return node

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        pairs = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
        found: dict[Any, Any] = {}
        for key, value in pairs:
            if key in found:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} appears twice", problem_mark=node.start_mark)
            found[key] = loader.construct_object(value, deep=True)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)
    number = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
MOST_CHARACTERS = 253


def is_host_name(text: str) -> bool:
    """Whether a text is the name or address of a host, and cannot be an option, a list or a command to a launcher."""
    user, at, host = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        return False
    return (len(host) <= MOST_CHARACTERS and _NAME.fullmatch(host) is not None) or _is_address(host)


def check_host_name(text: str, where: str) -> str:
    """Return a host name."""
    if not is_host_name(text):
        raise ConfigError(
            f"{where}: {short(text)} is not a host name: write letters, digits, '-', '_' and '.', of "
            "which the first is not '-', or an address"
        )
    return text


def short(value: object) -> str:
    """Return a value for an error: its JSON, truncated to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_address(text: str) -> bool:
    """Whether a text is an address, which may name the network card that leads there (`fe80::1%eth0`)."""
    address, percent, zone = text.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return False
    try:
        ip_address(address)
    except ValueError:
        return False
    return True
