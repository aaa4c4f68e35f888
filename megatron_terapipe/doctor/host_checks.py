"""Checks of hosts: reached by ssh, software, devices, cores, memory and limits, folder and clocks.

Each check is a function of the facts, and yields a finding for everything that it looked at.
"""

import re
from collections.abc import Iterator, Sequence
from statistics import median_low

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from megatron_terapipe.doctor.facts import Examined, Host, HostFacts
from megatron_terapipe.doctor.findings import Finding, Level, counted, error, ok, same, some, warning
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
"""What ssh says, and what mends it."""

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
            yield ok("reach", host.name, "the probe answered")
            continue
        remedy = next((remedy for sign, remedy in REMEDIES if re.search(sign, host.failure, re.IGNORECASE)), None)
        remedy = (remedy or "run ssh HOST by hand").replace("HOST", host.name)
        who = "the launcher" if examined.launching.launcher in BY_SSH else "the doctor"
        rule = f"{who} must reach it by ssh without a password" if len(examined.hosts) > 1 else "it must answer"
        yield error("reach", host.name, host.failure, rule, remedy)


def launchers(examined: Examined) -> Iterator[Finding]:
    """Yield whether the programs of the launcher are there; one host needs none."""
    if len(examined.hosts) < 2:
        return
    launching = examined.launching
    places: list[tuple[str | None, dict[str, str]]] = [(None, launching.programs)]
    if launching.launcher in EVERYWHERE:
        places += [(host.name, facts.software.programs) for host, facts in examined.reached]
    for host, programs in places:
        for program in LAUNCHERS[launching.launcher]:
            if program in programs:
                yield ok("launcher", host, f"{program} is {programs[program]}")
            else:
                yield error(
                    "launcher",
                    host,
                    f"no {program} on the PATH{'' if host is not None else ' of this machine'}",
                    f"--launcher {launching.launcher} needs it",
                    f"install {program}, or choose another launcher",
                )


def one_machine(examined: Examined) -> Iterator[Finding]:
    """Yield whether two names of the hostfile lead to the same machine, whose devices ranks would share."""
    names: dict[tuple[str, ...], str] = {}
    for host, facts in examined.reached:
        machine = (facts.names.hostname, *facts.names.listed_addresses)
        first = names.setdefault(machine, host.name)
        if first != host.name:
            yield error(
                "hostfile",
                host.name,
                f"is the same machine as {first}",
                "ranks of both names would take the same devices",
                "name each machine once",
            )
    if len(names) == len(list(examined.reached)) > 1:
        yield ok("hostfile", None, f"{len(names)} names of {len(names)} machines")


def folders(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host has the working directory, Python and this project where the launcher expects them."""
    launching = examined.launching
    digests = ((host.name, facts.software.digest) for host, facts in examined.reached)
    first, reference = next(((name, digest) for name, digest in digests if digest is not None), ("", None))
    for host, facts in examined.reached:
        software = facts.software
        if software.has_folder:
            yield ok("directory", host.name, f"has {launching.directory}")
        else:
            yield error(
                "directory",
                host.name,
                f"no directory {launching.directory}",
                "the launcher enters the directory of your shell on all hosts",
                "start from a directory that all hosts share, or make it there",
            )
        if software.python is not None:
            yield ok("python", host.name, f"has {launching.python}")
        else:
            yield error(
                "python",
                host.name,
                f"no {launching.python}",
                "the launcher starts the Python of this shell on all hosts, by its path",
                "install the same environment there at the same path, or share its folder",
            )
        if software.digest is None:
            yield error(
                "project",
                host.name,
                f"no megatron-terapipe in {launching.project}",
                "all hosts need it at the same path",
                "copy or install it there, or share its folder",
            )
        elif software.digest == reference:
            yield ok("project", host.name, f"sources {software.digest} in {launching.project}")
        else:
            yield error(
                "project",
                host.name,
                f"sources {software.digest} in {launching.project}",
                f"{first} has {reference}, and ranks of different versions do not agree",
                "install the same version there",
            )


LEAST_PYTHON = "3.11"
COMPARED = ("torch", "deepspeed", "numpy", "transformers", "flash-attn", "flash-attn-3")
"""Packages that change the numbers or the messages of a rank."""


def packages(examined: Examined) -> Iterator[Finding]:
    """Yield whether each package is there in a version that this project takes, and is the same on all hosts."""
    hosts = list(examined.has_python)
    requirements = examined.launching.requirements
    if requirements is None:
        yield warning(
            "packages",
            None,
            "megatron-terapipe is not installed",
            "so the versions that it needs are not known",
            "pip install it, or --editable its folder",
        )
    wanted = [Requirement(each) for each in requirements or ("torch", "deepspeed", "numpy")]
    for host, facts in hosts:
        if Version(facts.software.python_version) < Version(LEAST_PYTHON):
            yield error(
                "packages",
                host.name,
                f"Python {facts.software.python_version}",
                f"must be {LEAST_PYTHON} or later",
                "make the environment with a later Python",
            )
        else:
            yield ok("packages", host.name, f"Python {facts.software.python_version}")
        for each in wanted:
            yield _version(host.name, each, facts.software.packages.get(each.name))
    yield from same(
        "packages",
        "Python",
        {host.name: facts.software.python_version for host, facts in hosts},
        "use one environment on all hosts",
    )
    for name in COMPARED:
        versions = {host.name: facts.software.packages.get(name) for host, facts in hosts}
        if any(versions.values()):
            yield from same("packages", name, versions, f"pip install one version of {name} everywhere")


def apex(examined: Examined) -> Iterator[Finding]:
    """Yield whether a package that is called apex is NVIDIA's."""
    for host, facts in examined.has_python:
        if facts.software.apex == "other":
            yield warning(
                "apex",
                host.name,
                "the package apex is not NVIDIA's",
                "PyPI's has the same name and no optimizers",
                "pip uninstall apex; torch's fused optimizer is used without it",
            )
        else:
            yield ok("apex", host.name, f"apex: {facts.software.apex or 'not installed, not needed'}")


def imports(examined: Examined) -> Iterator[Finding]:
    """Yield whether torch and DeepSpeed can be imported, see the devices, and talk by one NCCL."""
    asked = [(host, facts, host.imports) for host, facts in examined.has_python if host.imports is not None]
    for host, facts, told in asked:
        if told.error is not None:
            yield error(
                "imports",
                host.name,
                f"torch and DeepSpeed cannot be imported: {told.error}",
                "every rank imports them",
                f"run {examined.launching.python} -c 'import deepspeed' there",
            )
            continue
        yield ok("imports", host.name, f"torch and DeepSpeed work on {told.accelerator}")
        if facts.devices and told.cuda is None:
            yield error(
                "cuda",
                host.name,
                f"{len(facts.devices)} x {facts.devices[0].name}, and a torch without CUDA",
                "torch must be built for CUDA",
                "pip install the CUDA build of torch (pytorch.org/get-started)",
            )
        elif facts.devices and told.num_devices == 0:
            yield error(
                "cuda",
                host.name,
                f"driver {facts.devices[0].driver} lists {len(facts.devices)} devices, torch sees none",
                f"torch needs a driver for CUDA {told.cuda}, and CUDA_VISIBLE_DEVICES that shows them",
                "update the driver, or install a torch for an older CUDA",
            )
        elif facts.devices:
            yield ok("cuda", host.name, f"CUDA {told.cuda} on driver {facts.devices[0].driver}")
        if facts.software.toolkit is not None and told.cuda is not None:
            yield _toolkit(host.name, facts.software.toolkit, told.cuda)
    working = {host.name: told for host, _, told in asked if told.error is None}
    if any(told.nccl for told in working.values()):
        nccl = {name: told.nccl for name, told in working.items()}
        yield from same("nccl", "NCCL", nccl, "install one build of torch on all hosts")
    accelerators = {name: told.accelerator for name, told in working.items()}
    yield from same("imports", "accelerator", accelerators, "leave out hosts without devices, or set DS_ACCELERATOR")


def drivers(examined: Examined) -> Iterator[Finding]:
    """Yield whether all hosts have one driver."""
    found = {host.name: facts.devices[0].driver for host, facts in examined.reached if facts.devices}
    yield from same("cuda", "driver", found, "update the older ones", Level.WARNING)


def _version(host: str, requirement: Requirement, found: str | None) -> Finding:
    if found is None:
        return error("packages", host, f"no {requirement.name}", f"needs {requirement}", f"pip install '{requirement}'")
    try:
        fits = requirement.specifier.contains(Version(found), prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        return error(
            "packages",
            host,
            f"{requirement.name} {found}",
            f"must be {_bounds(str(requirement.specifier).split(','))}",
            f"pip install '{requirement}'",
        )
    return ok("packages", host, f"{requirement.name} {found}")


def _bounds(parts: Sequence[str]) -> str:
    return " and ".join(sorted(parts, reverse=True))


def _toolkit(host: str, toolkit: str, cuda: str) -> Finding:
    if toolkit.split(".")[0] == cuda.split(".")[0]:
        return ok("toolkit", host, f"nvcc {toolkit}, torch for CUDA {cuda}")
    return warning(
        "toolkit",
        host,
        f"nvcc {toolkit}, and torch for CUDA {cuda}",
        "DeepSpeed compiles its own kernels with a toolkit of torch's version alone",
        "install that toolkit and set CUDA_HOME; this project needs none of these kernels",
    )


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


GB = 1e9
LEAST_ROOM = 10 * GB
"""A checkpoint of a model of 0.6 billion parameters, with its optimizer in fp32 (16 bytes each)."""

OFFSET_S = 1.0


def folder(examined: Examined) -> Iterator[Finding]:
    """Yield whether files can be written where checkpoints go."""
    for host, facts in examined.reached:
        found = facts.folder
        if found.fault is not None:
            level = error if examined.launching.save_is_given else warning
            yield level(
                "disk",
                host.name,
                f"{found.path}: {found.fault}",
                "checkpoints are written by ranks of all hosts",
                "give it to this user, or name another with --save",
            )
        elif found.free_bytes < LEAST_ROOM:
            yield warning(
                "disk",
                host.name,
                f"{found.free_bytes / GB:.1f} GB free in {found.path}",
                f"a checkpoint has 16 bytes for each parameter, {LEAST_ROOM / GB:.0f} GB for 0.6 billion",
                "make room, or name another directory with --save",
            )
        else:
            yield ok("disk", host.name, f"{found.free_bytes / GB:.0f} GB free in {found.path}")


def shared(examined: Examined) -> Iterator[Finding]:
    """Yield whether all hosts see the same files where checkpoints go."""
    for host, facts in examined.reached:
        if facts.folder.sees_token is None:
            continue
        if facts.folder.sees_token:
            yield ok("shared disk", host.name, f"sees the files of the first host in {facts.folder.path}")
            continue
        level = error if examined.launching.save_is_given else warning
        yield level(
            "shared disk",
            host.name,
            f"{facts.folder.path} is another directory than on {examined.hosts[0].name}",
            "all ranks save into one directory, and the first rank must find all files",
            "name a directory on a shared disk with --save, here and for the run",
        )


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
            yield warning(
                "clocks",
                host.name,
                found,
                "torchrun takes a host for dead whose clock is 15 s off, and lines of logs come in a wrong order",
                "start chronyd or ntpd there",
            )
        else:
            yield ok("clocks", host.name, found)
