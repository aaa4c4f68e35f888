"""Whether the devices, cores and memory of hosts are enough for their ranks, and free."""

from collections.abc import Iterator

from megatron_terapipe.doctor.facts import Examined, Host, HostFacts
from megatron_terapipe.doctor.findings import Finding, Level, counted, error, ok, same, some, warning
from megatron_terapipe.doctor.launch_variables import variables_of_rank

GIB = 2**30
FREE_SHARE = 0.9
"""Of a device's memory that should be free: a driver and a desktop leave more."""

BYTES_OF_RANK = GIB
"""Memory of a process with torch and DeepSpeed loaded and no model yet: a quarter of it was measured on CPUs."""

LEAST_SHARED_MEMORY = GIB
"""NCCL lets the ranks of a host meet in /dev/shm, and recommends 1 GB of it to containers (NCCL, troubleshooting)."""

THREADS_OF_RANK = 128
FILES_OF_RANK = 256
CONNECTIONS_TO_RANK = 4
"""A rank keeps open: files of its own, and some connections to each other rank."""


def num_ranks(host: Host, facts: HostFacts) -> int:
    """Return how many ranks a launch starts on a host: its slots, or without a hostfile one for each device."""
    return host.slots if host.slots is not None else max(1, len(facts.devices))


def uses_devices(examined: Examined, host: Host, facts: HostFacts) -> bool:
    """Whether ranks of a host compute on accelerators."""
    if host.imports is not None and host.imports.accelerator is not None:
        return host.imports.accelerator != "cpu"
    chosen = variables_of_rank(examined.launching, facts.variables).get("DS_ACCELERATOR")
    return bool(facts.devices) if chosen is None else chosen != "cpu"


def slots(examined: Examined) -> Iterator[Finding]:
    """Yield whether hosts have a device, or a core, for each slot."""
    for host, facts in examined.reached:
        ranks = num_ranks(host, facts)
        if uses_devices(examined, host, facts):
            yield _devices_of_slots(host, facts, ranks)
        yield _cores_of_slots(host, facts, ranks, has_devices=uses_devices(examined, host, facts))


def _devices_of_slots(host: Host, facts: HostFacts, ranks: int) -> Finding:
    found = len(facts.devices) or (host.imports.num_devices if host.imports is not None else 0)
    listed = f"slots={ranks}, and {counted(found, 'device')}"
    if ranks > found:
        remedy = f"write slots={found}, or mend the devices" if found else "mend its driver, or leave this host out"
        return error("slots", host.name, listed, "every slot needs a device", remedy)
    if ranks < found and host.slots is not None:
        rule = f"{found - ranks} of the devices would be idle"
        return warning("slots", host.name, listed, rule, f"write slots={found} to use all")
    return ok("slots", host.name, f"{counted(found, 'device')} for {counted(ranks, 'rank')}")


def _cores_of_slots(host: Host, facts: HostFacts, ranks: int, *, has_devices: bool) -> Finding:
    cores = facts.resources.cores
    found = f"{counted(ranks, 'rank')} on {counted(cores, 'core')}"
    if ranks <= cores:
        return ok("cores", host.name, found)
    if has_devices:
        remedy = "give the job more cores (--cpus-per-task of Slurm, cpu of a container)"
        return warning("cores", host.name, found, "each rank needs a core to launch kernels", remedy)
    return warning("cores", host.name, found, "ranks that share a core wait for each other", f"write slots={cores}")


def free_devices(examined: Examined) -> Iterator[Finding]:
    """Yield whether devices are free, and of one kind on all hosts."""
    for host, facts in examined.reached:
        if not uses_devices(examined, host, facts):
            continue
        for number, device in enumerate(facts.devices):
            share = device.free_bytes / max(device.memory_bytes, 1)
            free = f"device {number}: {device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
            if device.processes or share < FREE_SHARE:
                by = f", used by {some(device.processes)}" if device.processes else ""
                yield warning(
                    "device memory", host.name, free + by, "a run expects all of it", "end what uses it (nvidia-smi)"
                )
            else:
                yield ok("device memory", host.name, free)
        kinds = sorted({device.name for device in facts.devices})
        if len(kinds) > 1:
            yield warning(
                "device kinds",
                host.name,
                f"devices of {len(kinds)} kinds: {some(kinds)}",
                "the slowest decides",
                "let the search place the stages: terapipe search rank with a cluster file",
            )
    kinds_of = {host.name: some(sorted({each.name for each in facts.devices})) for host, facts in examined.reached}
    if any(kinds_of.values()):
        yield from same("device kinds", "devices", kinds_of, "see terapipe search rank", Level.WARNING)


def memory(examined: Examined) -> Iterator[Finding]:
    """Yield whether hosts have memory for their ranks before there is a model, and /dev/shm where NCCL needs it."""
    for host, facts in examined.reached:
        ranks, resources = num_ranks(host, facts), facts.resources
        free = f"{resources.free_memory_bytes / GIB:.1f} of {resources.memory_bytes / GIB:.1f} GiB of memory free"
        if resources.free_memory_bytes < ranks * BYTES_OF_RANK:
            yield warning(
                "memory",
                host.name,
                free,
                f"{ranks} ranks take about {ranks * BYTES_OF_RANK / GIB:.0f} GiB before there is a model",
                "end other programs, or give fewer slots",
            )
        else:
            yield ok("memory", host.name, free)
        size, shared = resources.shared_memory_bytes or 0, resources.free_shared_memory_bytes
        if uses_devices(examined, host, facts) and ranks > 1 and shared < LEAST_SHARED_MEMORY:
            yield warning(
                "shared memory",
                host.name,
                f"{shared / GIB:.2f} of {size / GIB:.2f} GiB of /dev/shm free",
                "NCCL needs about 1 GiB of it between ranks of a host",
                "start the container with --shm-size=8g, or remove what fills it",
            )
        else:
            yield ok("shared memory", host.name, f"{size / GIB:.2f} GiB of /dev/shm")


def limits(examined: Examined) -> Iterator[Finding]:
    """Yield whether the limits of processes are high enough for the ranks."""
    all_ranks = sum(num_ranks(host, facts) for host, facts in examined.reached)
    for host, facts in examined.reached:
        resources, ranks = facts.resources, num_ranks(host, facts)
        needed = FILES_OF_RANK + CONNECTIONS_TO_RANK * all_ranks
        yield _limit(host.name, "open files", "ulimit -n", resources.open_files, needed)
        yield _limit(host.name, "processes", "ulimit -u", resources.processes, THREADS_OF_RANK * ranks)
        if resources.has_infiniband and resources.locked_memory_bytes is not None:
            yield error(
                "locked memory",
                host.name,
                f"ulimit -l {resources.locked_memory_bytes // 1024}",
                "InfiniBand needs pages locked into memory",
                "set memlock unlimited in /etc/security/limits.conf, or --ulimit memlock=-1 for a container",
            )
        else:
            yield ok("locked memory", host.name, "no limit, or no InfiniBand that needs one")


def _limit(host: str, check: str, name: str, limit: int | None, needed: int) -> Finding:
    if limit is None or limit >= needed:
        return ok(check, host, f"{name} {'unlimited' if limit is None else limit}")
    rule = f"the ranks may need {needed}"
    return warning(check, host, f"{name} {limit}", rule, f"raise it to {needed} in /etc/security/limits.conf")
