"""Whether hosts know each other's names, reach each other's ports, and over which links."""

from collections.abc import Iterator
from statistics import median

from megatron_terapipe.doctor.addresses import GLOO, is_loopback, meeting_address, rank_address
from megatron_terapipe.doctor.checks.devices import uses_devices
from megatron_terapipe.doctor.facts import Examined, HostFacts, Interface, Link
from megatron_terapipe.doctor.findings import Finding, Level, error, ok, same, warning
from megatron_terapipe.doctor.launch_variables import variables_of_rank

MBIT = 1e6 / 8
LEAST_PORT = 1024
"""Ports below it are for the system's own servers."""

SLOW_CARD_MBIT = 1000
MOST_EXPECTED_MBIT = 3000
"""One connection of a short test reaches this on any faster card."""

EXPECTED_SHARE = 0.15
"""Of the speed of a card that a good link reaches in a short test, also where a host is busy."""

FAR_ROUND_TRIP_S = 1e-3
"""Hosts of one machine room answer in a tenth of this."""


def names(examined: Examined) -> Iterator[Finding]:
    """Yield whether a host's own name leads to an address that others can reach."""
    if len(examined.hosts) < 2:
        return
    for host, facts in examined.reached:
        own, hostname = facts.names.own_addresses, facts.names.hostname
        interface = variables_of_rank(examined.launching, facts.variables).get(GLOO)
        if interface is not None:
            yield ok("names", host.name, f"{GLOO}={interface} stands for its name")
        elif not own:
            yield warning(
                "names",
                host.name,
                f"its own name {hostname} leads nowhere",
                "gloo tells the other ranks the address of this name",
                f"write its address and name into /etc/hosts there, or set {GLOO}",
            )
        elif all(map(is_loopback, own)):
            level = warning if uses_devices(examined, host, facts) else error
            yield level(
                "names",
                host.name,
                f"its own name {hostname} leads to {own[0]}",
                "gloo tells this address to the other ranks, and there it is theirs",
                f"write its address in place of {own[0]} into /etc/hosts there, or set {GLOO}",
            )
        else:
            yield ok("names", host.name, f"{hostname} is {own[0]}")


def looked_up(examined: Examined) -> Iterator[Finding]:
    """Yield whether hosts look up one another's names alike."""
    for index, each in enumerate(examined.hosts):
        name = each.name.rpartition("@")[2]
        found = {
            host.name: facts.names.others.get(name, ())
            for other, (host, facts) in enumerate(examined.reached)
            if other != index
        }
        lost = [host for host, addresses in found.items() if not addresses]
        wrong = [
            host
            for host, addresses in found.items()
            if addresses and host != each.name and all(map(is_loopback, addresses))
        ]
        for host in lost:
            yield warning(
                "lookup",
                host,
                f"cannot look up {name}",
                "mpirun, srun and --rdzv-endpoint use names",
                "write it into /etc/hosts there or into the DNS; pdsh needs it on the launching host alone",
            )
        for host in wrong:
            yield error(
                "lookup", host, f"takes {name} for itself", "a name must lead to its host", "mend /etc/hosts there"
            )
        if found and not lost and not wrong:
            yield ok("lookup", None, f"{name} is known to all hosts")


def ports(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host reaches the others, and the place where the ranks meet."""
    launching = examined.launching
    if len(examined.hosts) > 1:
        yield from _meeting(examined)
    elif examined.meeting_fault is not None:
        yield from _meeting(examined)
    for host, _ in examined.reached:
        if len(examined.hosts) > 1 and rank_address(launching, host) is None:
            yield error(
                "ports",
                host.name,
                "has no address but loopback",
                "ranks of other hosts must reach it",
                "bring its network interface up",
            )
    for link in examined.links:
        if link.fault is None:
            yield ok("ports", link.source, f"reaches {link.target} ({link.address}, port {link.port})")
        else:
            yield _blocked(link)


def outgoing_ports(examined: Examined) -> Iterator[Finding]:
    """Yield whether the port where ranks meet is one that the system gives to no connection by chance."""
    port, first = examined.launching.master_port, examined.hosts[0]
    if first.facts is None or first.facts.resources.outgoing_ports is None:
        return
    begin, end = first.facts.resources.outgoing_ports
    if begin <= port <= end:
        yield warning(
            "meeting",
            first.name,
            f"port {port} is one of {begin} to {end}",
            "the system gives these to outgoing connections, also just before the ranks meet",
            f"take one below {begin} (--master_port of the launcher, --master-port here)"
            if begin > LEAST_PORT
            else "reserve it: sysctl net.ipv4.ip_local_reserved_ports",
        )
    else:
        yield ok("meeting", first.name, f"port {port} is none of {begin} to {end}")


def links(examined: Examined) -> Iterator[Finding]:
    """Yield whether the links between hosts are as fast as their cards, and as one another."""
    facts_of = {host.name: facts for host, facts in examined.reached}
    measured = [link for link in examined.links if link.bandwidth is not None and link.fault is None]
    usual = median([link.bandwidth for link in measured if link.bandwidth is not None]) if measured else 0.0
    for link in measured:
        assert link.bandwidth is not None
        used = _used(facts_of.get(link.source), link)
        card = used.speed_mbit if used is not None else None
        expected = 0.0 if card is None else min(EXPECTED_SHARE * card, MOST_EXPECTED_MBIT) * MBIT
        found = f"{gigabits(link.bandwidth)} to {link.target} over {link.interface or 'an unknown interface'}"
        if link.bandwidth < expected:
            yield warning(
                "bandwidth",
                link.source,
                found,
                f"its card has {card / 1000:g} Gbit/s" if card is not None else "",
                "look for other traffic, a bad cable, or a slow switch between them",
            )
        elif len(measured) > 2 and link.bandwidth < usual / 3:
            rule = f"the others have {gigabits(usual)}"
            yield warning("bandwidth", link.source, found, rule, "look for other traffic, a bad cable or a slow switch")
        else:
            yield ok("bandwidth", link.source, found)
    for link in examined.links:
        if link.round_trip_s is None:
            continue
        found = f"{1e6 * link.round_trip_s:.0f} us to {link.target} and back"
        if link.round_trip_s > FAR_ROUND_TRIP_S:
            rule = "hosts of one room answer within 1 ms, and every token slice waits for messages"
            yield warning("round trip", link.source, found, rule, "use hosts that stand together, and leave them idle")
        else:
            yield ok("round trip", link.source, found)


def routes(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks use the fastest cards, and packets of one size."""
    used: dict[str, Interface] = {}
    for host, facts in examined.reached:
        for link in examined.links:
            if link.source == host.name and link.fault is None and (each := _used(facts, link)) is not None:
                used[host.name] = each
        if host.name not in used:
            continue
        mine = used[host.name]
        others = [each for each in facts.interfaces if each.is_up and each.name != mine.name and each.addresses]
        fastest = max(others, key=lambda each: each.speed_mbit or 0, default=None)
        slow = mine.speed_mbit is not None and mine.speed_mbit <= SLOW_CARD_MBIT
        if slow and fastest is not None and (fastest.speed_mbit or 0) > SLOW_CARD_MBIT:
            yield warning(
                "route",
                host.name,
                f"messages go over {mine.name} with {mine.speed_mbit} Mbit/s",
                f"{fastest.name} has {(fastest.speed_mbit or 0) / 1000:g} Gbit/s",
                f"set NCCL_SOCKET_IFNAME={fastest.name} and {GLOO}={fastest.name} for all hosts",
            )
        else:
            yield ok("route", host.name, f"messages go over {mine.name}")
    sizes = {name: str(each.largest_packet) for name, each in used.items()}
    remedy = "give all cards and the switch one MTU: larger packets are lost on the way to smaller ones"
    yield from same("route", "largest packet (MTU)", sizes, remedy, Level.WARNING)


def gigabits(bytes_per_s: float) -> str:
    """Return a bandwidth for people."""
    return f"{8e-9 * bytes_per_s:.3g} Gbit/s"


def _meeting(examined: Examined) -> Iterator[Finding]:
    first, port = examined.hosts[0], examined.launching.master_port
    if first.facts is None:
        return
    if examined.meeting_fault is not None:
        yield error(
            "meeting",
            first.name,
            f"port {port}: {examined.meeting_fault}",
            "the ranks meet on it",
            "end the run that has it, or take another port (--master_port of the launcher, --master-port here)",
        )
    address = meeting_address(first)
    if address is None:
        yield error(
            "meeting",
            first.name,
            "hostname -I prints no address",
            "DeepSpeed asks it where the ranks meet",
            "give the launcher --master_addr ADDRESS",
        )
        return
    own = rank_address(examined.launching, first)
    if own is not None and own != address:
        yield warning(
            "meeting",
            first.name,
            f"hostname -I prints {address} first",
            f"its name leads to {own}, and DeepSpeed takes the first",
            f"if ranks do not meet, give the launcher --master_addr {own}",
        )
    else:
        yield ok("meeting", first.name, f"ranks meet at {address}, port {port}")


def _blocked(link: Link) -> Finding:
    place = f"port {link.port} of {link.target} ({link.address}): {link.fault}"
    if link.fault is not None and link.fault.startswith("small messages"):
        remedy = "give both cards and the switch one MTU, and look for a firewall that drops packets that say so"
        return error("ports", link.source, place, "tensors are large messages", remedy)
    if link.is_meeting:
        remedy = (
            f"open this port on {link.target}, or choose an address that leads there (--master_addr of the launcher)"
        )
        return error("meeting", link.source, place, "the ranks meet there", remedy)
    remedy = f"let {link.target} take connections from {link.source} on all ports from 1024: ranks choose any"
    return error("ports", link.source, place, "every rank connects to others", remedy)


def _used(facts: HostFacts | None, link: Link) -> Interface | None:
    interfaces = () if facts is None else facts.interfaces
    return next((each for each in interfaces if each.name == link.interface), None)
