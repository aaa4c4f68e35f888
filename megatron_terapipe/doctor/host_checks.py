"""Checks of hosts: reached by ssh, software, devices, cores, memory and limits, folder and clocks."""

import re
from collections.abc import Iterator
from statistics import median_low

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

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
    some,
    warning,
)
from megatron_terapipe.doctor.launching import variables_of_rank

REMEDIES = (
    (r"permission denied", "put your public key there (ssh-copy-id HOST), and start an ssh-agent if it has a password"),
    (r"host key verification failed|host identification has changed", "run ssh HOST once and look at its key"),
    (r"could not resolve|name or service not known", "write the name into /etc/hosts, ~/.ssh/config or the DNS"),
    (r"connection refused", "start sshd there, or name its port with --ssh-port"),
    (r"timed out|no route|no answer|unreachable", "start the host, or open port 22 of it; --timeout waits for longer"),
    (
        r"not found|no such file|SyntaxError|TypeError",
        "install Python 3.11 or later there, at the path that it has here",
    ),
)
"""Messages of ssh, and their remedies."""

LAUNCHERS = {"pdsh": ("pdsh", "ssh"), "openmpi": ("mpirun",), "slurm": ("srun",), "mpich": ("mpiexec",), "ssh": ()}
"""Programs that each launcher needs; `ssh` stands for torchrun and others that are started by hand on each host."""

EVERYWHERE = ("openmpi", "mpich")
"""Launchers whose program must be on all hosts."""

BY_SSH = ("pdsh", "openmpi", "mpich")
"""Launchers that start the ranks of other hosts over ssh."""


def reached(examined: Examined) -> Iterator[Finding]:
    """Yield whether the probe of each host answered."""
    for host in examined.hosts:
        if host.failure is None:
            yield ok("the probe answered", host.name)
            continue
        remedy = next((remedy for sign, remedy in REMEDIES if re.search(sign, host.failure, re.IGNORECASE)), None)
        remedy = (remedy or "run ssh HOST by hand").replace("HOST", host.name)
        who = "the launcher" if examined.launching.launcher in BY_SSH else "the doctor"
        rule = f"{who} must reach it by ssh without a password" if len(examined.hosts) > 1 else "it must answer"
        yield error(host.failure, rule, remedy, host.name)


def launchers(examined: Examined) -> Iterator[Finding]:
    """Yield whether the programs of the launcher are there; one host needs none."""
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
    """Yield whether two names of the hostfile lead to the same machine, whose devices ranks would share."""
    names: dict[tuple[str, ...], str] = {}
    for host, facts in examined.reached:
        first = names.setdefault((facts.names.hostname, *facts.names.listed_addresses), host.name)
        if first != host.name:
            rule = "ranks of both names would take the same devices"
            yield error(f"is the same machine as {first}", rule, "name each machine once", host.name)
    if len(names) == len(list(examined.reached)) > 1:
        yield ok(f"{len(names)} names of {len(names)} machines")


@on_each_host
def directory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether the working directory of the launch is there."""
    folder = examined.launching.directory
    if facts.software.has_folder:
        return f"has {folder}"
    rule = "the launcher enters the directory of your shell on all hosts"
    return error(f"no directory {folder}", rule, "start from a directory that all hosts share, or make it there")


@on_each_host
def python(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether the Python of the launch is there."""
    path = examined.launching.python
    if facts.software.python is not None:
        return f"has {path}"
    rule = "the launcher starts the Python of this shell on all hosts, by its path"
    return error(f"no {path}", rule, "install the same environment there at the same path, or share its folder")


@on_each_host
def project(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether this project is there, in one version on all hosts."""
    folder, digest = examined.launching.project, facts.software.digest
    if digest is None:
        rule = "all hosts need it at the same path"
        return error(f"no megatron-terapipe in {folder}", rule, "copy or install it there, or share its folder")
    found = f"sources {digest} in {folder}"
    digests = ((each.name, its.software.digest) for each, its in examined.reached)
    first, reference = next((name, digest) for name, digest in digests if digest is not None)
    if digest == reference:
        return found
    rule = f"{first} has {reference}, and ranks of different versions do not agree"
    return error(found, rule, "install the same version there")


LEAST_PYTHON = "3.11"
COMPARED = ("torch", "deepspeed", "numpy", "transformers", "flash-attn", "flash-attn-3")
"""Packages that change the numbers or the messages of a rank."""


def packages(examined: Examined) -> Iterator[Finding]:
    """Yield whether each package is there in a version that this project takes, and is the same on all hosts."""
    requirements = examined.launching.requirements
    if requirements is None:
        rule = "so the versions that it needs are not known"
        yield warning("megatron-terapipe is not installed", rule, "pip install it, or --editable its folder")
    wanted = [Requirement(each) for each in requirements or ("torch", "deepspeed", "numpy")]
    software = {host.name: facts.software for host, facts in examined.has_python}
    for host, found in software.items():
        version = f"Python {found.python_version}"
        if Version(found.python_version) < Version(LEAST_PYTHON):
            rule = f"must be {LEAST_PYTHON} or later"
            yield error(version, rule, "make the environment with a later Python", host)
        else:
            yield ok(version, host)
        for each in wanted:
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


@on_each_host
def apex(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether a package that is called apex is NVIDIA's."""
    if facts.software.python is None:
        return None
    if facts.software.apex != "other":
        return f"apex: {facts.software.apex or 'not installed, not needed'}"
    rule = "PyPI's has the same name and no optimizers"
    remedy = "pip uninstall apex; torch's fused optimizer is used without it"
    return warning("the package apex is not NVIDIA's", rule, remedy)


def imports(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch and DeepSpeed can be imported, on one kind of accelerator."""
    accelerators = {}
    for host, _ in examined.has_python:
        if host.imports is None:
            continue
        if host.imports.error is None:
            accelerators[host.name] = host.imports.accelerator
            yield ok(f"torch and DeepSpeed work on {host.imports.accelerator}", host.name)
        else:
            found = f"torch and DeepSpeed cannot be imported: {host.imports.error}"
            remedy = f"run {examined.launching.python} -c 'import deepspeed' there"
            yield error(found, "every rank imports them", remedy, host.name)
    yield from same("accelerator", accelerators, "leave out hosts without devices, or set DS_ACCELERATOR")


def cuda(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch sees the devices, and whether all hosts have one driver."""
    drivers: dict[str, str | None] = {}
    for host, facts in examined.reached:
        if not facts.devices:
            continue
        driver, number, told = facts.devices[0].driver, len(facts.devices), host.imports
        drivers[host.name] = driver
        if told is None or told.error is not None or facts.software.python is None:
            continue
        if told.cuda is None:
            found = f"{number} x {facts.devices[0].name}, and a torch without CUDA"
            remedy = "pip install the CUDA build of torch (pytorch.org/get-started)"
            yield error(found, "torch must be built for CUDA", remedy, host.name)
        elif told.num_devices == 0:
            found = f"driver {driver} lists {number} devices, torch sees none"
            rule = f"torch needs a driver for CUDA {told.cuda}, and CUDA_VISIBLE_DEVICES that shows them"
            yield error(found, rule, "update the driver, or install a torch for an older CUDA", host.name)
        else:
            yield ok(f"CUDA {told.cuda} on driver {driver}", host.name)
    yield from same("driver", drivers, "update the older ones", Level.WARNING)


@on_each_host
def toolkit(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether CUDA's compiler has the version of torch's CUDA."""
    version, told = facts.software.toolkit, host.imports
    if facts.software.python is None or version is None or told is None or told.cuda is None:
        return None
    if version.split(".")[0] == told.cuda.split(".")[0]:
        return f"nvcc {version}, torch for CUDA {told.cuda}"
    rule = "DeepSpeed compiles its own kernels with a toolkit of torch's version alone"
    remedy = "install that toolkit and set CUDA_HOME; this project needs none of these kernels"
    return warning(f"nvcc {version}, and torch for CUDA {told.cuda}", rule, remedy)


def nccl(examined: Examined) -> Iterator[Finding]:
    """Yield whether all hosts have one NCCL."""
    told = ((host.name, host.imports) for host, _ in examined.has_python)
    versions = {name: each.nccl for name, each in told if each is not None and each.error is None}
    if any(versions.values()):
        yield from same("NCCL", versions, "install one build of torch on all hosts")


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


@on_each_host
def slots(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether there is a device for each slot."""
    if not uses_devices(examined, host, facts):
        return None
    ranks = num_ranks(host, facts)
    devices = len(facts.devices) or (host.imports.num_devices if host.imports is not None else 0)
    found = f"slots={ranks}, and {counted(devices, 'device')}"
    if ranks > devices:
        remedy = f"write slots={devices}, or mend the devices" if devices else "mend its driver, or leave this host out"
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
    """Whether devices are free."""
    for number, device in enumerate(facts.devices if uses_devices(examined, host, facts) else ()):
        free = f"device {number}: {device.free_bytes / GIB:.1f} of {device.memory_bytes / GIB:.1f} GiB free"
        if device.processes or device.free_bytes / max(device.memory_bytes, 1) < FREE_SHARE:
            by = f", used by {some(device.processes)}" if device.processes else ""
            yield warning(free + by, "a run expects all of it", "end what uses it (nvidia-smi)")
        else:
            yield free


def device_kinds(examined: Examined) -> Iterator[Finding]:
    """Yield whether devices are of one kind."""
    kinds = {host.name: sorted({each.name for each in facts.devices}) for host, facts in examined.reached}
    for host, facts in examined.reached:
        names = kinds[host.name]
        if len(names) > 1 and uses_devices(examined, host, facts):
            remedy = "let the search place the stages: terapipe search rank with a cluster file"
            yield warning(f"devices of {len(names)} kinds: {some(names)}", "the slowest decides", remedy, host.name)
    if any(kinds.values()):
        texts = {name: some(each) for name, each in kinds.items()}
        yield from same("devices", texts, "see terapipe search rank", Level.WARNING)


@on_each_host
def memory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether there is memory for the ranks before there is a model."""
    ranks, resources = num_ranks(host, facts), facts.resources
    free = f"{resources.free_memory_bytes / GIB:.1f} of {resources.memory_bytes / GIB:.1f} GiB of memory free"
    if resources.free_memory_bytes >= ranks * BYTES_OF_RANK:
        return free
    rule = f"{ranks} ranks take about {ranks * BYTES_OF_RANK / GIB:.0f} GiB before there is a model"
    return warning(free, rule, "end other programs, or give fewer slots")


@on_each_host
def shared_memory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether /dev/shm is large enough for NCCL."""
    size, free = facts.resources.shared_memory_bytes or 0, facts.resources.free_shared_memory_bytes
    if free >= LEAST_SHARED_MEMORY or num_ranks(host, facts) < 2 or not uses_devices(examined, host, facts):
        return f"{size / GIB:.2f} GiB of /dev/shm"
    found = f"{free / GIB:.2f} of {size / GIB:.2f} GiB of /dev/shm free"
    remedy = "start the container with --shm-size=8g, or remove what fills it"
    return warning(found, "NCCL needs about 1 GiB of it between ranks of a host", remedy)


@on_each_host
def open_files(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether ranks may open files and connections enough."""
    all_ranks = sum(num_ranks(each, its) for each, its in examined.reached)
    return _limit("ulimit -n", facts.resources.open_files, FILES_OF_RANK + CONNECTIONS_TO_RANK * all_ranks)


@on_each_host
def processes(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether ranks may start threads enough."""
    return _limit("ulimit -u", facts.resources.processes, THREADS_OF_RANK * num_ranks(host, facts))


def _limit(name: str, limit: int | None, needed: int) -> Verdict:
    if limit is None or limit >= needed:
        return f"{name} {'unlimited' if limit is None else limit}"
    remedy = f"raise it to {needed} in /etc/security/limits.conf"
    return warning(f"{name} {limit}", f"the ranks may need {needed}", remedy)


@on_each_host
def locked_memory(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether InfiniBand may lock pages into memory."""
    limit = facts.resources.locked_memory_bytes
    if limit is None or not facts.resources.has_infiniband:
        return "no limit, or no InfiniBand that needs one"
    remedy = "set memlock unlimited in /etc/security/limits.conf, or --ulimit memlock=-1 for a container"
    return error(f"ulimit -l {limit // 1024}", "InfiniBand needs pages locked into memory", remedy)


GB = 1e9
LEAST_ROOM = 10 * GB
"""A checkpoint of a model of 0.6 billion parameters, with its optimizer in fp32 (16 bytes each)."""


@on_each_host
def disk(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether files can be written in the directory for checkpoints."""
    folder, fault = facts.folder, error if examined.launching.save_is_given else warning
    if folder.fault is not None:
        rule = "checkpoints are written by ranks of all hosts"
        return fault(f"{folder.path}: {folder.fault}", rule, "give it to this user, or name another with --save")
    if folder.free_bytes >= LEAST_ROOM:
        return f"{folder.free_bytes / GB:.0f} GB free in {folder.path}"
    rule = f"a checkpoint has 16 bytes for each parameter, {LEAST_ROOM / GB:.0f} GB for 0.6 billion"
    remedy = "make room, or name another directory with --save"
    return warning(f"{folder.free_bytes / GB:.1f} GB free in {folder.path}", rule, remedy)


@on_each_host
def shared_disk(examined: Examined, host: Host, facts: HostFacts) -> Verdict:
    """Whether all hosts see the same files in the directory for checkpoints."""
    folder, fault = facts.folder, error if examined.launching.save_is_given else warning
    if folder.sees_token is None:
        return None
    if folder.sees_token:
        return f"sees the files of the first host in {folder.path}"
    found = f"{folder.path} is another directory than on {examined.hosts[0].name}"
    rule = "all ranks save into one directory, and the first rank must find all files"
    return fault(found, rule, "name a directory on a shared disk with --save, here and for the run")


OFFSET_S = 1.0


def clocks(examined: Examined) -> Iterator[Finding]:
    """Yield whether clocks agree: torchrun compares them, and so do people who read logs."""
    asked = [(host, host.clock) for host in examined.hosts if host.clock is not None]
    if len(asked) < 2:
        return
    usual = median_low(clock.offset_s for _, clock in asked)
    reference, uncertainty_s = next((host, clock.uncertainty_s) for host, clock in asked if clock.offset_s == usual)
    for host, clock in asked:
        offset_s = clock.offset_s - usual
        within_s = 0.0 if host is reference else clock.uncertainty_s + uncertainty_s
        found = f"its clock is {offset_s:+.3f} s (within {within_s:.3f} s) beside that of {reference.name}"
        if abs(offset_s) - within_s > OFFSET_S:
            rule = "torchrun takes a host for dead whose clock is 15 s off, and lines of logs come in a wrong order"
            yield warning(found, rule, "start chronyd or ntpd there", host.name)
        else:
            yield ok(found, host.name)
