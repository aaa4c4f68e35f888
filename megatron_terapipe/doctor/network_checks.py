"""Checks between hosts: variables of ranks that must agree, names, ports, links, routes and their bandwidth."""

import re
from collections.abc import Iterator
from statistics import median

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, check_cuda_environment
from megatron_terapipe.doctor.facts import Examined, Host, HostFacts, Interface, Link
from megatron_terapipe.doctor.findings import (
    Finding,
    Level,
    Verdict,
    counted,
    error,
    ok,
    on_each_host,
    same,
    warning,
)
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


def environment_file(examined: Examined) -> Iterator[Finding]:
    """Yield whether the launcher can read the lines of .deepspeed_env."""
    lines = examined.launching.environment_file
    if lines is None or len(examined.hosts) < 2:
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not re.match(r"[A-Za-z_]\w*=", line)]
    if wrong:
        found = f"line {wrong[0]} of .deepspeed_env is not NAME=VALUE"
        yield error(found, "the launcher ends at an empty line, a comment or any other", "remove it")
    else:
        yield ok(f"{len(lines)} lines of .deepspeed_env")


def variables(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks see the variables of this shell, and the same ones on all hosts."""
    launching = examined.launching
    of_host = {host.name: variables_of_rank(launching, facts.variables) for host, facts in examined.reached}
    if len(examined.hosts) > 1 and launching.launcher not in BY_HAND:
        lost = [
            f"{name}={value}"
            for name, value in launching.variables.items()
            if not name.startswith(MAY_DIFFER) and any(each.get(name) != value for each in of_host.values())
        ]
        if lost:
            rule = "DeepSpeed's launcher does not hand these on"
            remedy = "write them into .deepspeed_env, if ranks need them"
            yield warning(f"{', '.join(lost)} of this shell", rule, remedy)
        else:
            yield ok("every variable of this shell that matters reaches the ranks")
    for name in sorted({name for each in of_host.values() for name in each if not name.startswith(MAY_DIFFER)}):
        values: dict[str, str | None] = {
            host: f"{name}={each[name]}" if name in each else f"{name} unset" for host, each in of_host.items()
        }
        remedy = f"write {name} into .deepspeed_env, which the launcher hands to all hosts, or unset it everywhere"
        yield from same("variable", values, remedy, Level.ERROR if name.startswith(LOCKING) else Level.WARNING)


@on_each_host
def cuda_variables(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether the variables of CUDA let a pipeline run."""
    if not uses_devices(examined, host, facts):
        return
    ranks = sum(num_ranks(each, its) for each, its in examined.reached)
    try:
        lines = check_cuda_environment(variables_of_rank(examined.launching, facts.variables), num_pipeline_ranks=ranks)
    except UserError as fault:
        found, _, remedy = str(fault).rpartition(": ")
        yield error(found, "", remedy)
        return
    for line in lines:
        found, _, remedy = line.rpartition(": ")
        yield warning(found, "", remedy)
    if not lines:
        yield "CUDA's variables are good, or set by the trainer"


@on_each_host
def threads(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether the threads of all ranks fit the cores."""
    told = variables_of_rank(examined.launching, facts.variables).get("OMP_NUM_THREADS")
    ranks, cores = num_ranks(host, facts), facts.resources.cores
    if told is None:
        return "OMP_NUM_THREADS is not set: the trainer gives each rank its share of cores"
    if not re.fullmatch(r"\d+(,\d+)*", told) or int(told.split(",")[0]) == 0:
        return error(f"OMP_NUM_THREADS={told}", "must be a whole number from 1", "unset it")
    found = f"OMP_NUM_THREADS={told} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
    if int(told.split(",")[0]) * ranks > max(cores, ranks):
        rule = "threads that share a core wait for each other"
        return warning(found, rule, f"set {max(1, cores // ranks)}, or unset it")
    return found


@on_each_host
def interfaces(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether the interfaces that NCCL and gloo are told to use exist."""
    variables = variables_of_rank(examined.launching, facts.variables)
    up = [each.name for each in facts.interfaces if each.is_up]
    for name in (NCCL, GLOO):
        if name not in variables:
            continue
        value = variables[name]
        if name == GLOO:
            is_there = all(word.strip() in up for word in value.split(","))
        else:
            is_there = any(is_chosen(value, each) for each in up)
        found, rule = f"{name}={value}", f"no such interface is up; there are {', '.join(up)}"
        yield found if is_there else error(found, rule, f"set one of them, or unset {name}")


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


@on_each_host
def names(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether a host's own name leads to an address that others can reach."""
    if len(examined.hosts) < 2:
        return None
    own, hostname = facts.names.own_addresses, facts.names.hostname
    interface = variables_of_rank(examined.launching, facts.variables).get(GLOO)
    if interface is not None:
        return f"{GLOO}={interface} stands for its name"
    if not own:
        remedy = f"write its address and name into /etc/hosts there, or set {GLOO}"
        rule = "gloo tells the other ranks the address of this name"
        return warning(f"its own name {hostname} leads nowhere", rule, remedy)
    if not all(map(is_loopback, own)):
        return f"{hostname} is {own[0]}"
    fault = warning if uses_devices(examined, host, facts) else error
    rule = "gloo tells this address to the other ranks, and there it is theirs"
    remedy = f"write its address in place of {own[0]} into /etc/hosts there, or set {GLOO}"
    return fault(f"its own name {hostname} leads to {own[0]}", rule, remedy)


def lookup(examined: Examined) -> Iterator[Finding]:
    """Yield whether hosts look up one another's names alike."""
    for index, each in enumerate(examined.hosts):
        name = each.name.rpartition("@")[2]
        found = {
            host.name: facts.names.others.get(name, ())
            for other, (host, facts) in enumerate(examined.reached)
            if other != index
        }
        is_good = bool(found)
        for host, addresses in found.items():
            if not addresses:
                rule = "mpirun, srun and --rdzv-endpoint use names"
                remedy = "write it into /etc/hosts there or into the DNS; pdsh needs it on the launching host alone"
                yield warning(f"cannot look up {name}", rule, remedy, host)
                is_good = False
            elif host != each.name and all(map(is_loopback, addresses)):
                rule = "a name must lead to its host"
                yield error(f"takes {name} for itself", rule, "mend /etc/hosts there", host)
                is_good = False
        if is_good:
            yield ok(f"{name} is known to all hosts")


def meeting(examined: Examined) -> Iterator[Finding]:
    """Yield whether the place where ranks meet is one, and all hosts reach it."""
    first, port = examined.hosts[0], examined.launching.master_port
    if first.facts is None:
        return
    if examined.meeting_fault is not None:
        remedy = "end the run that has it, or take another port (--master_port of the launcher, --master-port here)"
        yield error(f"port {port}: {examined.meeting_fault}", "the ranks meet on it", remedy, first.name)
    if len(examined.hosts) > 1:
        yield _meeting_address(examined, first)
    for link in examined.links:
        if link.is_meeting and link.fault is None:
            yield ok(f"reaches {link.target} ({link.address}, port {link.port})", link.source)
        elif link.is_meeting:
            other = "choose an address that leads there (--master_addr of the launcher)"
            remedy = f"open this port on {link.target}, or {other}"
            yield error(_place(link), "the ranks meet there", remedy, link.source)
    if first.facts.resources.outgoing_ports is None:
        return
    begin, end = first.facts.resources.outgoing_ports
    if begin <= port <= end:
        rule = "the system gives these to outgoing connections, also just before the ranks meet"
        remedy = "reserve it: sysctl net.ipv4.ip_local_reserved_ports"
        if begin > LEAST_PORT:
            remedy = f"take one below {begin} (--master_port of the launcher, --master-port here)"
        yield warning(f"port {port} is one of {begin} to {end}", rule, remedy, first.name)
    else:
        yield ok(f"port {port} is none of {begin} to {end}", first.name)


def _meeting_address(examined: Examined, first: Host) -> Finding:
    address, own = meeting_address(first), rank_address(examined.launching, first)
    if address is None:
        rule = "DeepSpeed asks it where the ranks meet"
        return error("hostname -I prints no address", rule, "give the launcher --master_addr ADDRESS", first.name)
    if own is not None and own != address:
        rule = f"its name leads to {own}, and DeepSpeed takes the first"
        remedy = f"if ranks do not meet, give the launcher --master_addr {own}"
        return warning(f"hostname -I prints {address} first", rule, remedy, first.name)
    return ok(f"ranks meet at {address}, port {examined.launching.master_port}", first.name)


def ports(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host reaches the others."""
    for host, _ in examined.reached:
        if len(examined.hosts) > 1 and rank_address(examined.launching, host) is None:
            rule = "ranks of other hosts must reach it"
            yield error("has no address but loopback", rule, "bring its network interface up", host.name)
    for link in examined.links:
        if link.is_meeting:
            continue
        if link.fault is None:
            yield ok(f"reaches {link.target} ({link.address}, port {link.port})", link.source)
        elif link.fault.startswith("small messages"):
            remedy = "give both cards and the switch one MTU, and look for a firewall that drops packets that say so"
            yield error(_place(link), "tensors are large messages", remedy, link.source)
        else:
            remedy = f"let {link.target} take connections from {link.source} on all ports from 1024: ranks choose any"
            yield error(_place(link), "every rank connects to others", remedy, link.source)


def _place(link: Link) -> str:
    return f"port {link.port} of {link.target} ({link.address}): {link.fault}"


def bandwidth(examined: Examined) -> Iterator[Finding]:
    """Yield whether the links between hosts are as fast as their cards, and as one another."""
    facts_of = {host.name: facts for host, facts in examined.reached}
    measured = [(link, link.bandwidth) for link in examined.links if link.bandwidth is not None and link.fault is None]
    usual = median([each for _, each in measured]) if measured else 0.0
    for link, speed in measured:
        used = _used(facts_of.get(link.source), link)
        card = None if used is None else used.speed_mbit
        found = f"{gigabits(speed)} to {link.target} over {link.interface or 'an unknown interface'}"
        if card is not None and speed < min(EXPECTED_SHARE * card, MOST_EXPECTED_MBIT) * MBIT:
            remedy = "look for other traffic, a bad cable, or a slow switch between them"
            yield warning(found, f"its card has {card / 1000:g} Gbit/s", remedy, link.source)
        elif len(measured) > 2 and speed < usual / 3:
            remedy = "look for other traffic, a bad cable or a slow switch"
            yield warning(found, f"the others have {gigabits(usual)}", remedy, link.source)
        else:
            yield ok(found, link.source)


def round_trip(examined: Examined) -> Iterator[Finding]:
    """Yield whether hosts answer as fast as those of one machine room."""
    for link in examined.links:
        if link.round_trip_s is None:
            continue
        found = f"{1e6 * link.round_trip_s:.0f} us to {link.target} and back"
        if link.round_trip_s > FAR_ROUND_TRIP_S:
            rule = "hosts of one room answer within 1 ms, and every token slice waits for messages"
            yield warning(found, rule, "use hosts that stand together, and leave them idle", link.source)
        else:
            yield ok(found, link.source)


def route(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks use the fastest cards, and packets of one size."""
    sizes: dict[str, str | None] = {}
    for host, facts in examined.reached:
        links = [link for link in examined.links if link.source == host.name and link.fault is None]
        used = [each for link in links if (each := _used(facts, link)) is not None]
        if not used:
            continue
        mine = used[-1]
        sizes[host.name] = str(mine.largest_packet)
        others = [each for each in facts.interfaces if each.is_up and each.name != mine.name and each.addresses]
        fastest = max(others, key=lambda each: each.speed_mbit or 0, default=mine)
        slow = mine.speed_mbit is not None and mine.speed_mbit <= SLOW_CARD_MBIT
        if slow and (fastest.speed_mbit or 0) > SLOW_CARD_MBIT:
            found = f"messages go over {mine.name} with {mine.speed_mbit} Mbit/s"
            rule = f"{fastest.name} has {(fastest.speed_mbit or 0) / 1000:g} Gbit/s"
            remedy = f"set NCCL_SOCKET_IFNAME={fastest.name} and {GLOO}={fastest.name} for all hosts"
            yield warning(found, rule, remedy, host.name)
        else:
            yield ok(f"messages go over {mine.name}", host.name)
    remedy = "give all cards and the switch one MTU: larger packets are lost on the way to smaller ones"
    yield from same("largest packet (MTU)", sizes, remedy, Level.WARNING)


def gigabits(bytes_per_s: float) -> str:
    """Return a bandwidth for people."""
    return f"{8e-9 * bytes_per_s:.3g} Gbit/s"


def _used(facts: HostFacts | None, link: Link) -> Interface | None:
    interfaces = () if facts is None else facts.interfaces
    return next((each for each in interfaces if each.name == link.interface), None)
