"""Checks between hosts: variables of ranks, names, the rendezvous and links."""

import re
from collections.abc import Iterator

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, check_cuda_environment
from megatron_terapipe.doctor.facts import Examined, Host, HostFacts
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
"""Prefixes of variables that the launcher sets itself, or that differ between hosts with different cards."""

LOCKING = ("NCCL_", HARDWARE_QUEUES)
"""Prefixes of variables that must be equal on all ranks: else a run hangs or ends."""


def environment_file(examined: Examined) -> Iterator[Finding]:
    """Yield whether the launcher can read the lines of .deepspeed_env."""
    lines = examined.launching.environment_file
    if lines is None or len(examined.hosts) < 2:
        return
    wrong = [number for number, line in enumerate(lines, start=1) if not re.match(r"[A-Za-z_]\w*=", line)]
    if wrong:
        found = f"line {wrong[0]} of .deepspeed_env is not NAME=VALUE"
        yield error(found, "the launcher fails at an empty line, a comment or any other", "remove it")
    else:
        yield ok(f"{len(lines)} lines of .deepspeed_env")


def variables(examined: Examined) -> Iterator[Finding]:
    """Yield whether ranks have the variables of this shell, and the same ones on all hosts."""
    launching = examined.launching
    of_host = {host.name: variables_of_rank(launching, facts.variables) for host, facts in examined.reached}
    if len(examined.hosts) > 1 and launching.launcher not in BY_HAND:
        lost = [
            f"{name}={value}"
            for name, value in launching.variables.items()
            if not name.startswith(MAY_DIFFER) and any(each.get(name) != value for each in of_host.values())
        ]
        if lost:
            rule = "DeepSpeed's launcher does not export these"
            remedy = "write them into .deepspeed_env, if ranks need them"
            yield warning(f"{', '.join(lost)} of this shell", rule, remedy)
        else:
            yield ok("every relevant variable of this shell reaches the ranks")
    for name in sorted({name for each in of_host.values() for name in each if not name.startswith(MAY_DIFFER)}):
        values: dict[str, str | None] = {
            host: f"{name}={each[name]}" if name in each else f"{name} unset" for host, each in of_host.items()
        }
        remedy = f"write {name} into .deepspeed_env, which the launcher exports to all hosts, or unset it everywhere"
        yield from same("variable", values, remedy, Level.ERROR if name.startswith(LOCKING) else Level.WARNING)


@on_each_host
def cuda_variables(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether a pipeline can run with the variables of CUDA."""
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
    value = variables_of_rank(examined.launching, facts.variables).get("OMP_NUM_THREADS")
    ranks, cores = num_ranks(host, facts), facts.resources.cores
    if value is None:
        return "OMP_NUM_THREADS is not set: the trainer gives each rank its share of cores"
    if not re.fullmatch(r"\d+(,\d+)*", value) or int(value.split(",")[0]) == 0:
        return error(f"OMP_NUM_THREADS={value}", "must be a whole number from 1", "unset it")
    found = f"OMP_NUM_THREADS={value} for {counted(ranks, 'rank')} on {counted(cores, 'core')}"
    if int(value.split(",")[0]) * ranks > max(cores, ranks):
        rule = "threads that share a core wait for each other"
        return warning(found, rule, f"set {max(1, cores // ranks)}, or unset it")
    return found


@on_each_host
def interfaces(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether the interfaces in the variables of NCCL and gloo exist."""
    variables = variables_of_rank(examined.launching, facts.variables)
    up = [each.name for each in facts.interfaces if each.is_up]
    for name in (NCCL, GLOO):
        if name not in variables:
            continue
        value = variables[name]
        if name == GLOO:
            exists = all(word.strip() in up for word in value.split(","))
        else:
            exists = any(is_chosen(value, each) for each in up)
        found, rule = f"{name}={value}", f"no such interface is up; there are {', '.join(up)}"
        yield found if exists else error(found, rule, f"set one of them, or unset {name}")


FAR_ROUND_TRIP_S = 1e-3
"""Hosts in the same machine room answer in a tenth of this."""


@on_each_host
def names(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether a host's own name resolves to an address that others can reach."""
    if len(examined.hosts) < 2:
        return None
    own, hostname = facts.names.own_addresses, facts.names.hostname
    interface = variables_of_rank(examined.launching, facts.variables).get(GLOO)
    if interface is not None:
        return f"{GLOO}={interface} is used in place of its name"
    if not own:
        remedy = f"add its address and name to /etc/hosts there, or set {GLOO}"
        rule = "gloo advertises the address of this name"
        return warning(f"its own name {hostname} does not resolve", rule, remedy)
    if not all(map(is_loopback, own)):
        return f"{hostname} is {own[0]}"
    fault = warning if uses_devices(examined, host, facts) else error
    rule = "gloo advertises this address; on other hosts it means localhost"
    remedy = f"write its address in place of {own[0]} into /etc/hosts there, or set {GLOO}"
    return fault(f"its own name {hostname} resolves to {own[0]}", rule, remedy)


def meeting(examined: Examined) -> Iterator[Finding]:
    """Yield whether the port of the rendezvous is free, and its address the one that other ranks reach."""
    first, port = examined.hosts[0], examined.launching.master_port
    if first.facts is None:
        return
    if examined.meeting_fault is not None:
        remedy = "end the run that uses it, or use another port (--master_port of the launcher, --master-port here)"
        yield error(f"port {port}: {examined.meeting_fault}", "the rendezvous needs it", remedy, first.name)
    if len(examined.hosts) < 2:
        return
    address, own = meeting_address(first), rank_address(examined.launching, first)
    if address is None:
        rule = "DeepSpeed takes the address of the rendezvous from it"
        yield error("hostname -I prints no address", rule, "give the launcher --master_addr ADDRESS", first.name)
    elif own is not None and own != address:
        rule = f"its name resolves to {own}, and DeepSpeed uses the first"
        remedy = f"if ranks do not meet, give the launcher --master_addr {own}"
        yield warning(f"hostname -I prints {address} first", rule, remedy, first.name)
    else:
        yield ok(f"the rendezvous is {address}, port {port}", first.name)


def links(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host reaches the next one and the rendezvous, as fast as in one machine room."""
    for host, _ in examined.reached:
        if len(examined.hosts) > 1 and rank_address(examined.launching, host) is None:
            rule = "ranks of other hosts must reach it"
            yield error("has no address but loopback", rule, "bring its network interface up", host.name)
    for link in examined.links:
        place = f"port {link.port} of {link.target} ({link.address})"
        if link.fault is not None and link.is_meeting:
            other = "choose an address that is reachable (--master_addr of the launcher)"
            remedy = f"open this port on {link.target}, or {other}"
            yield error(f"{place}: {link.fault}", "all ranks connect to the rendezvous", remedy, link.source)
        elif link.fault is not None:
            remedy = f"allow connections from {link.source} to {link.target} on all ports from 1024: ranks choose any"
            yield error(f"{place}: {link.fault}", "every rank connects to others", remedy, link.source)
        elif link.round_trip_s is not None:
            found = f"{1e6 * link.round_trip_s:.0f} us to {place} and back"
            if link.round_trip_s > FAR_ROUND_TRIP_S:
                rule = "hosts of one room answer within 1 ms, and every token slice waits for messages"
                yield warning(found, rule, "use hosts of one room, without other programs on them", link.source)
            else:
                yield ok(found, link.source)
