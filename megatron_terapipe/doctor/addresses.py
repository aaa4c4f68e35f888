"""By which addresses ranks on different hosts reach each other, and over which interfaces."""

from collections.abc import Sequence
from ipaddress import ip_address

from megatron_terapipe.doctor.facts import Host, HostFacts, Interface, Launching
from megatron_terapipe.doctor.launch_variables import variables_of_rank

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def meeting_address(first: Host) -> str | None:
    """Return the address at which DeepSpeed lets ranks meet: the first that `hostname -I` prints on the first host."""
    listed = first.facts.names.listed_addresses if first.facts is not None else ()
    return listed[0] if listed else None


def rank_address(launching: Launching, host: Host) -> str | None:
    """Return the address at which the ranks of a host listen for the others.

    It is that of the interface that a variable names; else the host's own name, which gloo looks up; else the first
    that it has.

    Args:
        launching: from where the variables come.
    """
    if host.facts is None:
        return None
    named = named_interfaces(variables_of_rank(launching, host.facts.variables), host.facts.interfaces)
    own = [each for each in host.facts.names.own_addresses if not is_loopback(each)]
    candidates = [*(address for each in named for address in each.addresses), *own]
    candidates += host.facts.names.listed_addresses
    # IPv4 first, as torch does; addresses of one link alone need a zone, which other hosts name otherwise.
    usable = [each for each in candidates if not ip_address(each.partition("%")[0]).is_link_local]
    return next((each for each in usable if ":" not in each), usable[0] if usable else None)


def named_interfaces(variables: dict[str, str], interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that the variables of NCCL and gloo name, those of gloo first."""
    exact = [name.strip() for name in variables.get(GLOO, "").split(",") if name.strip()]
    found = [each for each in interfaces if each.name in exact]
    return [*found, *(each for each in interfaces if NCCL in variables and is_chosen(variables[NCCL], each.name))]


def is_chosen(pattern: str, name: str) -> bool:
    """Whether NCCL takes an interface: names begin with one of a list, are one of it (=), or are none of it (^)."""
    excluded, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    hit = name in words if exact else name.startswith(tuple(words))
    # Without a name NCCL leaves out loopback and containers' bridges where there is another.
    return hit != excluded and not (excluded and name == "lo")


def interface_of(facts: HostFacts, address: str) -> str | None:
    """Return the name of the interface that has an address.

    Args:
        address: as the system says it, perhaps an IPv4 one in the clothes of IPv6.
    """
    plain = address.removeprefix("::ffff:").partition("%")[0]
    return next((each.name for each in facts.interfaces if plain in each.addresses), None)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ip_address(address.partition("%")[0]).is_loopback
