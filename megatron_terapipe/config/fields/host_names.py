"""Names of hosts. Launchers hand them to ssh, pdsh and mpirun, to which other words are options, lists or commands.

A host name is letters, digits and hyphens between dots (RFC 1123, section 2.1), and underscores, which clusters use,
or an address. `user@` may stand before it.
"""

import json
import re
from ipaddress import ip_address

from megatron_terapipe.errors import ConfigError

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")
_ZONE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
MOST_CHARACTERS = 253
"""Of a host name."""


def is_host_name(text: str) -> bool:
    """Whether a text is the name or address of a host, and nothing else to any launcher."""
    user, at, host = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        return False
    return (len(host) <= MOST_CHARACTERS and _NAME.fullmatch(host) is not None) or _is_address(host)


def check_host_name(text: str, where: str) -> str:
    """Return a host name.

    Args:
        text: what stands where a host is named.

    Raises:
        ConfigError: if it is none: ssh would take a name that begins with a dash for an option, which can run commands.
    """
    if not is_host_name(text):
        raise ConfigError(
            f"{where}: {json.dumps(text)[:60]} is not a host name: write letters, digits, '-', '_' and '.', of "
            "which the first is no '-', or an address"
        )
    return text


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
