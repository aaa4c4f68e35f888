"""Checks between hosts: variables of ranks that must agree, names, ports, links, routes and their bandwidth.

Each check is a function of the facts, and yields a finding for everything that it looked at.
"""

import re
from collections.abc import Iterator
from statistics import median

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, check_cuda_environment
from megatron_terapipe.doctor.facts import Examined, HostFacts, Interface, Link
from megatron_terapipe.doctor.findings import Finding, Level, counted, error, ok, same, warning
from megatron_terapipe.doctor.host_checks import num_ranks, uses_devices
from megatron_terapipe.doctor.launching import (
    BY_HAND,
    GLOO,
    NCCL,
    is_chosen,
    is_loopback,
    meeting_address,
    rank_address,
    variables_of_rank,
)

MAY_DIFFER = (
    *("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
"""Beginnings of variables that the launcher sets itself, or that hosts with other cards have otherwise."""

LOCKING = ("NCCL_", HARDWARE_QUEUES)
"""Beginnings of those that lock or end a run where two ranks have different ones."""


def cuda(examined: Examined) -> Iterator[Finding]:
    """Yield whether the variables of CUDA let a pipeline run."""
    ranks = sum(num_ranks(host, facts) for host, facts in examined.reached)
    for host, facts in examined.reached:
        if not uses_devices(examined, host, facts):
            continue
        variables = variables_of_rank(examined.launching, facts.variables)
        try:
            lines = check_cuda_environment(variables, num_pipeline_ranks=ranks)
        except UserError as fault:
            found, _, remedy = str(fault).rpartition(": ")
            yield error("variables", host.name, found, "", remedy)
            continue
        for line in lines:
            found, _, remedy = line.rpartition(": ")
            yield warning("variables", host.name, found, "", remedy)
        if not lines:
            yield ok("variables", host.name, "CUDA's variables are good, or set by the trainer")


def threads(examined: Examined) -> Iterator[Finding]:
    """Yield whether the threads of all ranks of a host fit its cores."""
    for host, facts in examined.reached:
        told = variables_of_rank(examined.launching, facts.variables).get("OMP_NUM_THREADS")
        ranks, cores = num_ranks(host, facts), facts.resources.cores
        listed = f"OMP_NUM_THREADS={told} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
        if told is None:
            yield ok("threads", host.name, "OMP_NUM_THREADS is not set: the trainer gives each rank its share of cores")
        elif not re.fullmatch(r"\d+(,\d+)*", told) or int(told.split(",")[0]) == 0:
            yield error("threads", host.name, f"OMP_NUM_THREADS={told}", "must be a whole number from 1", "unset it")
        elif int(told.split(",")[0]) * ranks > max(cores, ranks):
            yield warning(
                "threads",
                host.name,
                listed,
                "threads that share a core wait for each other",
                f"set {max(1, cores // ranks)}, or unset it",
            )
        else:
            yield ok(
                "threads", host.name, f"OMP_NUM_THREADS={told} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
            )


def differences(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks see the same variables on all hosts."""
    of_host = {host.name: variables_of_rank(examined.launching, facts.variables) for host, facts in examined.reached}
    found = {name for variables in of_host.values() for name in variables}
    names = sorted(name for name in found if not name.startswith(MAY_DIFFER))
    for name in names:
        values = {host: _said(name, variables.get(name)) for host, variables in of_host.items()}
        remedy = f"write {name} into .deepspeed_env, which the launcher hands to all hosts, or unset it everywhere"
        level = Level.ERROR if name.startswith(LOCKING) else Level.WARNING
        yield from same("variables", "variable", values, remedy, level)


def interfaces(examined: Examined) -> Iterator[Finding]:
    """Yield whether the interfaces that NCCL and gloo are told to use exist."""
    for host, facts in examined.reached:
        variables = variables_of_rank(examined.launching, facts.variables)
        up = [each.name for each in facts.interfaces if each.is_up]
        for name in (NCCL, GLOO):
            if name not in variables:
                continue
            value = variables[name]
            wanted = [word.strip() for word in value.split(",")]
            missing = (
                [word for word in wanted if word not in up]
                if name == GLOO
                else [value] * (not any(is_chosen(value, each) for each in up))
            )
            if missing:
                yield error(
                    "interfaces",
                    host.name,
                    f"{name}={value}",
                    f"no such interface is up; there are {', '.join(up)}",
                    f"set one of them, or unset {name}",
                )
            else:
                yield ok("interfaces", host.name, f"{name}={value}")


def not_handed_on(examined: Examined) -> Iterator[Finding]:
    """Yield whether variables of this shell reach the ranks, which start on other hosts with others."""
    launching = examined.launching
    if len(examined.hosts) < 2 or launching.launcher in BY_HAND:
        return
    lost = []
    for name, value in launching.variables.items():
        reaching = [variables_of_rank(launching, facts.variables).get(name) for _, facts in examined.reached]
        if not name.startswith(MAY_DIFFER) and any(each != value for each in reaching):
            lost.append(f"{name}={value}")
    if lost:
        yield warning(
            "variables",
            None,
            f"{', '.join(lost)} of this shell",
            "DeepSpeed's launcher does not hand these on",
            "write them into .deepspeed_env, if ranks need them",
        )
    else:
        yield ok("variables", None, "every variable of this shell that matters reaches the ranks")


def environment_file(examined: Examined) -> Iterator[Finding]:
    """Yield whether the launcher can read the lines of .deepspeed_env."""
    lines = examined.launching.environment_file
    if lines is None or len(examined.hosts) < 2:
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not re.match(r"[A-Za-z_]\w*=", line)]
    if wrong:
        yield error(
            "deepspeed_env",
            None,
            f"line {wrong[0]} of .deepspeed_env is not NAME=VALUE",
            "the launcher ends at an empty line, a comment or any other",
            "remove it",
        )
    else:
        yield ok("deepspeed_env", None, f"{len(lines)} lines of .deepspeed_env")


def _said(name: str, value: str | None) -> str:
    return f"{name} unset" if value is None else f"{name}={value}"


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
