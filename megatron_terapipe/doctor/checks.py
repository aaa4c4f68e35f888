"""The checks: of hosts, of their network, and (last) the table of all."""

import re
from collections.abc import Iterator
from dataclasses import replace
from statistics import median_low

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES, check_cuda_environment
from megatron_terapipe.doctor.facts import (
    BY_HAND,
    GLOO,
    NCCL,
    Examined,
    Host,
    HostFacts,
    is_chosen,
    is_loopback,
    line_that_changes,
    meeting_address,
    rank_address,
    variables_of_rank,
)
from megatron_terapipe.doctor.findings import (
    GIB,
    Check,
    Finding,
    Level,
    Verdict,
    counted,
    error,
    listed,
    merged,
    ok,
    on_each_host,
    same,
    warning,
)

REMEDIES = (
    (r"permission denied", "put your public key there (ssh-copy-id HOST), and start an ssh-agent if it has a password"),
    (r"host key verification failed|host identification has changed", "run ssh HOST once and check its key"),
    (r"could not resolve|name or service not known", "add the name to /etc/hosts, ~/.ssh/config or the DNS"),
    (r"connection refused", "start sshd there, or give its port with --ssh-port"),
    (r"timed out|no route|no answer|unreachable", "start the host, or open its port 22; --timeout waits longer"),
    (
        r"not found|no such file|SyntaxError|TypeError",
        "install Python 3.11 or later there, at the same path as here",
    ),
)
"""Messages of ssh, and their remedies."""

LAUNCHERS = {"pdsh": ("pdsh", "ssh"), "openmpi": ("mpirun",), "slurm": ("srun",), "mpich": ("mpiexec",), "ssh": ()}
"""Programs that each launcher needs; `ssh` means torchrun and others that are started by hand on each host."""

EVERYWHERE = ("openmpi", "mpich")
"""Launchers whose program must be installed on all hosts."""

BY_SSH = ("pdsh", "openmpi", "mpich")
"""Launchers that start the ranks of other hosts over ssh."""


def reached(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host answered."""
    for host in examined.hosts:
        if host.failure is None:
            yield ok("the probe answered", host.name)
            continue
        remedy = next((remedy for sign, remedy in REMEDIES if re.search(sign, host.failure, re.IGNORECASE)), None)
        remedy = (remedy or "run ssh HOST by hand").replace("HOST", host.name)
        program = "the launcher" if examined.launching.launcher in BY_SSH else "the doctor"
        rule = f"{program} must reach it by ssh without a password" if len(examined.hosts) > 1 else "it must answer"
        yield error(host.failure, rule, remedy, host.name)


def launchers(examined: Examined) -> Iterator[Finding]:
    """Yield whether the programs of the launcher are installed; a run on one host needs none."""
    if len(examined.hosts) < 2:
        return
    launcher = examined.launching.launcher
    places: list[tuple[str | None, dict[str, str]]] = [(None, examined.launching.programs)]
    if launcher in EVERYWHERE:
        places += [(host.name, facts.software.programs) for host, facts in examined.reached]
    for host, programs in places:
        for program in LAUNCHERS[launcher]:
            if program in programs:
                yield ok(f"{program} is {programs[program]}", host)
            else:
                found = f"no {program} on the PATH{'' if host is not None else ' of this machine'}"
                remedy = f"install {program}, or choose another launcher"
                yield error(found, f"--launcher {launcher} needs it", remedy, host)


def one_machine(examined: Examined) -> Iterator[Finding]:
    """Yield whether two names of the hostfile are the same machine, whose devices ranks would share."""
    names: dict[tuple[str, ...], str] = {}
    for host, facts in examined.reached:
        first = names.setdefault((facts.names.hostname, *facts.names.listed_addresses), host.name)
        if first != host.name:
            rule = "ranks of both names would use the same devices"
            yield error(f"is the same machine as {first}", rule, "list each machine once", host.name)
    if len(names) == len(list(examined.reached)) > 1:
        yield ok(f"{len(names)} names of {len(names)} machines")


@on_each_host
def directory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether the working directory of the launch exists."""
    folder = examined.launching.directory
    if facts.software.has_folder:
        return f"has {folder}"
    rule = "the launcher enters the directory of your shell on all hosts"
    return error(f"no directory {folder}", rule, "start from a directory that all hosts share, or make it there")


@on_each_host
def python(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether the Python of the launch exists."""
    path = examined.launching.python
    if facts.software.python is not None:
        return f"has {path}"
    rule = "the launcher starts the Python of this shell on all hosts, by its path"
    return error(f"no {path}", rule, "install the same environment there at the same path, or share its folder")


@on_each_host
def project(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether this project is installed, with the same sources on all hosts."""
    folder, digest = examined.launching.project, facts.software.digest
    if digest is None:
        rule = "all hosts need it at the same path"
        return error(f"no megatron-terapipe in {folder}", rule, "copy or install it there, or share its folder")
    found = f"sources {digest} in {folder}"
    digests = ((each.name, its.software.digest) for each, its in examined.reached)
    first, reference = next((name, digest) for name, digest in digests if digest is not None)
    if digest == reference:
        return found
    return error(found, f"{first} has {reference}, and ranks need the same version", "install the same version there")


LEAST_PYTHON = "3.11"
COMPARED = ("torch", "deepspeed", "numpy", "transformers", "flash-attn", "flash-attn-3")
"""Packages that change the numbers or the messages of a rank."""


def packages(examined: Examined) -> Iterator[Finding]:
    """Yield whether each package has a version that this project accepts, the same on all hosts."""
    requirements = examined.launching.requirements
    if requirements is None:
        rule = "the versions that it needs are not available"
        yield warning("megatron-terapipe is not installed", rule, "pip install it, or --editable its folder")
    required = [Requirement(each) for each in requirements or ("torch", "deepspeed", "numpy")]
    software = {host.name: facts.software for host, facts in examined.has_python}
    for host, found in software.items():
        version = f"Python {found.python_version}"
        if Version(found.python_version) < Version(LEAST_PYTHON):
            rule = f"must be {LEAST_PYTHON} or later"
            yield error(version, rule, "make the environment with a later Python", host)
        else:
            yield ok(version, host)
        for each in required:
            yield _package(host, each, found.packages.get(each.name))
    versions: dict[str, str | None] = {host: each.python_version for host, each in software.items()}
    yield from same("Python", versions, "use one environment on all hosts")
    for name in COMPARED:
        versions = {host: each.packages.get(name) for host, each in software.items()}
        if any(versions.values()):
            yield from same(name, versions, f"pip install one version of {name} everywhere")


def _package(host: str, requirement: Requirement, found: str | None) -> Finding:
    name, remedy = requirement.name, f"pip install '{requirement}'"
    if found is None:
        return error(f"no {name}", f"needs {requirement}", remedy, host)
    try:
        fits = requirement.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = False
    if fits:
        return ok(f"{name} {found}", host)
    bounds = " and ".join(sorted(str(requirement.specifier).split(","), reverse=True))
    return error(f"{name} {found}", f"must be {bounds}", remedy, host)


def imports(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch and DeepSpeed can be imported, with one accelerator and one NCCL."""
    imported = [(host.name, host.imports) for host, _ in examined.has_python if host.imports is not None]
    for name, each in imported:
        if each.error is None:
            yield ok(f"torch and DeepSpeed work on {each.accelerator}", name)
        else:
            found = f"torch and DeepSpeed cannot be imported: {each.error}"
            remedy = f"run {examined.launching.python} -c 'import deepspeed' there"
            yield error(found, "every rank imports them", remedy, name)
    accelerators = {name: each.accelerator for name, each in imported if each.error is None}
    yield from same("accelerator", accelerators, "remove hosts without devices, or set DS_ACCELERATOR")
    versions = {name: each.nccl for name, each in imported if each.error is None}
    if any(versions.values()):
        yield from same("NCCL", versions, "install one build of torch on all hosts")


def cuda(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch can use the devices, and whether all hosts have one driver."""
    drivers: dict[str, str | None] = {}
    for host, facts in examined.reached:
        if not facts.devices:
            continue
        driver, number, imported = facts.devices[0].driver, len(facts.devices), host.imports
        drivers[host.name] = driver
        if imported is None or imported.error is not None or facts.software.python is None:
            continue
        if imported.cuda is None:
            found = f"{number} x {facts.devices[0].name}, and a torch without CUDA"
            remedy = "pip install the CUDA build of torch (pytorch.org/get-started)"
            yield error(found, "torch must be built for CUDA", remedy, host.name)
        elif imported.num_devices == 0:
            found = f"driver {driver} lists {number} devices, torch finds none"
            rule = f"torch needs a driver for CUDA {imported.cuda}, and a CUDA_VISIBLE_DEVICES that lists them"
            yield error(found, rule, "update the driver, or install a torch for an older CUDA", host.name)
        else:
            yield ok(f"CUDA {imported.cuda} on driver {driver}", host.name)
    yield from same("driver", drivers, "update the older ones", Level.WARNING)


FREE_SHARE = 0.9
"""Part of a device's memory that should be free: a driver and a desktop leave more."""

BYTES_OF_RANK = GIB
"""Memory of a process with torch and DeepSpeed loaded and no model yet: a quarter of it was measured on CPUs."""

LEAST_SHARED_MEMORY = GIB
"""NCCL connects the ranks of a host through /dev/shm, and recommends 1 GB in containers (NCCL, troubleshooting)."""

THREADS_OF_RANK = 128
FILES_OF_RANK = 256
CONNECTIONS_TO_RANK = 4
"""Open files of a rank: files of its own, and some connections to each other rank."""


def num_ranks(host: Host, facts: HostFacts) -> int:
    """Return the number of ranks that a launch starts on a host: its slots, or without a hostfile its devices."""
    return host.slots if host.slots is not None else max(1, len(facts.devices))


def uses_devices(examined: Examined, host: Host, facts: HostFacts) -> bool:
    """Whether ranks of a host compute on accelerators."""
    if host.imports is not None and host.imports.accelerator is not None:
        return host.imports.accelerator != "cpu"
    chosen = variables_of_rank(examined.launching, facts.variables).get("DS_ACCELERATOR")
    return bool(facts.devices) if chosen is None else chosen != "cpu"


@on_each_host
def slots(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether there is a device for each slot."""
    if not uses_devices(examined, host, facts):
        return None
    ranks = num_ranks(host, facts)
    devices = len(facts.devices) or (host.imports.num_devices if host.imports is not None else 0)
    found = f"slots={ranks}, and {counted(devices, 'device')}"
    if ranks > devices:
        remedy = f"write slots={devices}, or fix the devices" if devices else "fix its driver, or remove this host"
        return error(found, "every slot needs a device", remedy)
    if ranks < devices and host.slots is not None:
        return warning(found, f"{devices - ranks} of the devices would be idle", f"write slots={devices} to use all")
    return f"{counted(devices, 'device')} for {counted(ranks, 'rank')}"


@on_each_host
def cores(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether there is a core for each rank."""
    ranks, cores = num_ranks(host, facts), facts.resources.cores
    found = f"{counted(ranks, 'rank')} on {counted(cores, 'core')}"
    if ranks <= cores:
        return found
    if uses_devices(examined, host, facts):
        remedy = "give the job more cores (--cpus-per-task of Slurm, cpu of a container)"
        return warning(found, "each rank needs a core to launch kernels", remedy)
    return warning(found, "ranks that share a core wait for each other", f"write slots={cores}")


@on_each_host
def device_memory(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether the memory of devices is free."""
    for number, device in enumerate(facts.devices if uses_devices(examined, host, facts) else ()):
        free = f"device {number}: {device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
        if device.processes or device.free_bytes / max(device.memory_bytes, 1) < FREE_SHARE:
            by = f", used by {listed(device.processes)}" if device.processes else ""
            yield warning(free + by, "a run expects all of it", "end the processes that use it (nvidia-smi)")
        else:
            yield free


def device_kinds(examined: Examined) -> Iterator[Finding]:
    """Yield whether all devices are of one kind."""
    kinds: dict[str, str | None] = {}
    for host, facts in examined.reached:
        names = sorted({each.name for each in facts.devices})
        kinds[host.name] = listed(names)
        if len(names) > 1 and uses_devices(examined, host, facts):
            remedy = "place the stages by terapipe search rank with a cluster file"
            yield warning(f"devices of {len(names)} kinds: {listed(names)}", "the slowest decides", remedy, host.name)
    if any(kinds.values()):
        yield from same("devices", kinds, "see terapipe search rank", Level.WARNING)


@on_each_host
def memory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether there is memory for the ranks, without a model."""
    ranks, resources = num_ranks(host, facts), facts.resources
    free = f"{resources.free_memory_bytes / GIB:.1f} of {resources.memory_bytes / GIB:.1f} GiB of memory free"
    if resources.free_memory_bytes >= ranks * BYTES_OF_RANK:
        return free
    rule = f"{ranks} ranks use about {ranks * BYTES_OF_RANK / GIB:.0f} GiB without a model"
    return warning(free, rule, "end other programs, or give fewer slots")


@on_each_host
def shared_memory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether /dev/shm is large enough for NCCL."""
    size, free = facts.resources.shared_memory_bytes or 0, facts.resources.free_shared_memory_bytes
    if free >= LEAST_SHARED_MEMORY or num_ranks(host, facts) < 2 or not uses_devices(examined, host, facts):
        return f"{size / GIB:.2f} GiB of /dev/shm"
    found = f"{free / GIB:.2f} of {size / GIB:.2f} GiB of /dev/shm free"
    remedy = "start the container with --shm-size=8g, or remove files from it"
    return warning(found, "NCCL needs about 1 GiB of it between ranks of a host", remedy)


@on_each_host
def limits(examined: Examined, host: Host, facts: HostFacts) -> Iterator[Verdict]:
    """Whether ranks may open enough files and connections, start enough threads, and lock memory for InfiniBand."""
    all_ranks = sum(num_ranks(each, its) for each, its in examined.reached)
    resources, where = facts.resources, "in /etc/security/limits.conf"
    for name, limit, needed in (
        ("ulimit -n", resources.open_files, FILES_OF_RANK + CONNECTIONS_TO_RANK * all_ranks),
        ("ulimit -u", resources.processes, THREADS_OF_RANK * num_ranks(host, facts)),
    ):
        if limit is None or limit >= needed:
            yield f"{name} {'unlimited' if limit is None else limit}"
        else:
            yield warning(f"{name} {limit}", f"the ranks may need {needed}", f"raise it to {needed} {where}")
    locked = resources.locked_memory_bytes
    if locked is not None and resources.has_infiniband:
        remedy = f"set memlock unlimited {where}, or --ulimit memlock=-1 for a container"
        yield error(f"ulimit -l {locked // 1024}", "InfiniBand locks pages in memory", remedy)


GB = 1e9
LEAST_ROOM = 10 * GB
"""A checkpoint of a model of 0.6 billion parameters, with its optimizer in fp32 (16 bytes each)."""


@on_each_host
def disk(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether files can be written to the directory for checkpoints."""
    folder, fault = facts.folder, error if examined.launching.save_is_given else warning
    if folder.fault is not None:
        rule = "checkpoints are written by ranks of all hosts"
        return fault(f"{folder.path}: {folder.fault}", rule, "make it writable, or give another one with --save")
    if folder.free_bytes >= LEAST_ROOM:
        return f"{folder.free_bytes / GB:.0f} GB free in {folder.path}"
    rule = f"a checkpoint has 16 bytes for each parameter, {LEAST_ROOM / GB:.0f} GB for 0.6 billion"
    remedy = "free some space, or give another directory with --save"
    return warning(f"{folder.free_bytes / GB:.1f} GB free in {folder.path}", rule, remedy)


@on_each_host
def shared_disk(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether all hosts have the same files in the directory for checkpoints."""
    folder, fault = facts.folder, error if examined.launching.save_is_given else warning
    if folder.sees_token is None:
        return None
    if folder.sees_token:
        return f"the files of the first host are visible in {folder.path}"
    found = f"{folder.path} is another directory than on {examined.hosts[0].name}"
    rule = "all ranks save into one directory, and the first rank must find all files"
    return fault(found, rule, "give a directory on a shared disk with --save, here and for the run")


OFFSET_S = 1.0


def clocks(examined: Examined) -> Iterator[Finding]:
    """Yield whether clocks agree: torchrun compares them, and users compare log lines."""
    compared = [(host, host.clock) for host in examined.hosts if host.clock is not None]
    if len(compared) < 2:
        return
    usual = median_low(clock.offset_s for _, clock in compared)
    reference, uncertainty_s = next((host, clock.uncertainty_s) for host, clock in compared if clock.offset_s == usual)
    for host, clock in compared:
        offset_s = clock.offset_s - usual
        within_s = 0.0 if host is reference else clock.uncertainty_s + uncertainty_s
        found = f"its clock is {offset_s:+.3f} s (within {within_s:.3f} s) from the clock of {reference.name}"
        if abs(offset_s) - within_s > OFFSET_S:
            rule = "torchrun ends a host whose clock is 15 s off, and log lines come in a wrong order"
            yield warning(found, rule, "start chronyd or ntpd there", host.name)
        else:
            yield ok(found, host.name)


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
    if lines is None or examined.launching.hostfile is None:
        return
    if (wrong := line_that_changes(lines)) is not None:
        yield error(*wrong)
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


CHECKS: tuple[tuple[str, Check], ...] = (
    *(("reach", reached), ("launcher", launchers), ("hostfile", one_machine), ("directory", directory)),
    *(("python", python), ("project", project), ("packages", packages), ("imports", imports), ("cuda", cuda)),
    *(("slots", slots), ("cores", cores), ("device memory", device_memory), ("device kinds", device_kinds)),
    *(("memory", memory), ("shared memory", shared_memory), ("limits", limits), ("deepspeed_env", environment_file)),
    *(("variables", variables), ("variables", cuda_variables), ("threads", threads), ("interfaces", interfaces)),
    *(("names", names), ("meeting", meeting), ("links", links), ("disk", disk), ("shared disk", shared_disk)),
    ("clocks", clocks),
)
"""All checks by name, in the order in which a launch needs them."""


def findings(examined: Examined) -> tuple[Finding, ...]:
    """Return the findings of all checks, errors first."""
    return merged(replace(finding, check=name) for name, check in CHECKS for finding in check(examined))
