"""Facts of hosts and of a launch from this machine: answers of the probe, input of the checks, and part of the JSON.

After the facts come the variables and addresses of ranks, which follow from them.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from megatron_terapipe.doctor import probe


@dataclass(frozen=True, kw_only=True)
class Software:
    """Installed software, for one Python."""

    python: str | None
    """Path of the Python that a launch starts; None if the host has none at it."""
    python_version: str
    """Of the Python that collected these facts."""
    packages: dict[str, str]
    """Versions of the compared packages that are installed."""
    digest: str | None
    """Of the sources of this project; None if they are not in the folder where the launch expects them."""
    programs: dict[str, str]
    """Paths of launchers that were found."""
    has_folder: bool
    """Whether the working directory of the launch exists."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, as its driver lists it."""

    name: str
    memory_bytes: int
    free_bytes: int
    processes: tuple[str, ...]
    """Processes that compute on it."""
    driver: str


@dataclass(frozen=True, kw_only=True)
class Imports:
    """Result of importing torch and DeepSpeed."""

    error: str | None = None
    """Last line of the error; None if there was none."""
    accelerator: str | None = None
    """DeepSpeed's, such as `cuda` or `cpu`."""
    num_devices: int = 0
    """Devices that torch can use; 0 on CPUs."""
    cuda: str | None = None
    """Version of CUDA that torch was built for; None for a build without."""
    nccl: str | None = None


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Cores, memory and limits of processes; a limit of None means unlimited."""

    cores: int
    """Cores that a process may use."""
    memory_bytes: int
    """Memory of the host, or of the container."""
    free_memory_bytes: int
    """Memory that is available without swapping."""
    shared_memory_bytes: int | None
    """Size of /dev/shm; None if there is none."""
    free_shared_memory_bytes: int
    locked_memory_bytes: int | None
    """Memory that a process may lock (`ulimit -l`)."""
    open_files: int | None
    """Files and connections of a process (`ulimit -n`)."""
    processes: int | None
    """Processes and threads of this user (`ulimit -u`)."""
    has_infiniband: bool
    """Whether there is an RDMA card."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool


@dataclass(frozen=True, kw_only=True)
class Names:
    """Name and addresses of a host."""

    hostname: str
    own_addresses: tuple[str, ...]
    """Addresses to which it resolves its own name; empty if it cannot."""
    listed_addresses: tuple[str, ...]
    """Output of `hostname -I`. DeepSpeed uses the first address of the first host."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The directory for checkpoints, or the nearest one above it that exists."""

    path: str
    fault: str | None
    """Why no file can be written there; None if one can."""
    free_bytes: int
    sees_token: bool | None = None
    """Whether the file that the first host wrote is visible in it; None if that was not tried."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Clock of a host, compared with the machine on which the doctor runs."""

    offset_s: float
    """Seconds that it is ahead."""
    uncertainty_s: float
    """Half of the width of the interval that the answers of the host allow."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """All facts that the probe returned for a host."""

    software: Software
    devices: tuple[Device, ...]
    resources: Resources
    interfaces: tuple[Interface, ...]
    names: Names
    variables: dict[str, str]
    """Variables of the environment that torch, CUDA and the network read."""
    folder: Folder


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and its facts."""

    name: str
    """Name in the hostfile; `this machine` without one."""
    slots: int | None = None
    """Ranks of this host in the hostfile; None without one."""
    failure: str | None = None
    """Why the probe did not answer; None if it did."""
    facts: HostFacts | None = None
    """Answer of the probe; None if there was none."""
    imports: Imports | None = None
    """Result of importing torch and DeepSpeed; None if that was not tried."""
    clock: Clock | None = None
    """Its clock; None if it was not compared."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """An attempt to reach a host from another one."""

    source: str
    """The host that connects."""
    target: str
    """The host that listens."""
    address: str
    port: int
    is_meeting: bool = False
    """Whether it is the rendezvous (master address and port) of the ranks."""
    fault: str | None = None
    """Why the connection failed; None if it did not."""
    round_trip_s: float | None = None
    """Fastest of some round trips; None if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Launching:
    """The machine on which the doctor runs, from which a launch would be started."""

    hostfile: str | None
    """Its path; None if only this machine is checked."""
    launcher: str
    """DeepSpeed's name of the launcher."""
    python: str
    """Path of the Python that the launcher starts on all hosts."""
    project: str
    """Folder of this project."""
    directory: str
    """Working directory, which the launcher enters on all hosts."""
    checkpoints: str
    save_is_given: bool
    """Whether `--save` named it."""
    master_port: int
    programs: dict[str, str]
    """Paths of the launchers that are installed here."""
    variables: dict[str, str]
    """Variables of this shell that torch, CUDA and the network read."""
    environment_file: tuple[str, ...] | None = None
    """Lines of .deepspeed_env, which the launcher reads here; None if there is none."""
    requirements: tuple[str, ...] | None = None
    """Packages that this project requires, from its metadata; None if it is not installed."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """All facts of one examination."""

    launching: Launching
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = field(default=())
    """Attempts to reach one host from another."""
    meeting_fault: str | None = None
    """Why the port of the rendezvous could not be opened; None if it could."""

    @property
    def reached(self) -> Iterator[tuple[Host, HostFacts]]:
        """Hosts that answered, with their facts."""
        return ((host, host.facts) for host in self.hosts if host.facts is not None)

    @property
    def has_python(self) -> Iterator[tuple[Host, HostFacts]]:
        """Hosts that answered and have the Python of the launch."""
        return ((host, facts) for host, facts in self.reached if facts.software.python is not None)


EXPORTS_ALL = ("slurm",)
"""Launchers that export all variables of the launching shell to the ranks: srun --export=ALL."""

BY_HAND = ("ssh",)
"""Launchers that are started on each host, in a shell of that host."""

EXPORTED = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW")
"""Prefixes of the variables that the launcher exports (EXPORT_ENVS of deepspeed/launcher/runner.py, 0.19.8)."""


def variables_of_rank(launching: Launching, of_host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that torch, CUDA and the network read."""
    if launching.hostfile is None or launching.launcher in BY_HAND:
        return dict(of_host)
    exported = launching.variables
    if launching.launcher not in EXPORTS_ALL:
        exported = {name: value for name, value in exported.items() if name.startswith(EXPORTED)}
    # Lines of .deepspeed_env, as the launcher reads them.
    parts = (line.rstrip("\n").partition("=") for line in launching.environment_file or ())
    return {**of_host, **exported, **{name.strip(): value for name, sign, value in parts if sign}}


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def meeting_address(first: Host) -> str | None:
    """Return the address of the rendezvous: the first that `hostname -I` prints on the first host."""
    listed = first.facts.names.listed_addresses if first.facts is not None else ()
    return listed[0] if listed else None


def rank_address(launching: Launching, host: Host) -> str | None:
    """Return the address at which the ranks of a host listen for the others.

    It belongs to the interface in the variables of gloo or NCCL; else to the host's own name; else it is the first one.
    """
    if host.facts is None:
        return None
    variables = variables_of_rank(launching, host.facts.variables)
    exact = [name.strip() for name in variables.get(GLOO, "").split(",")]
    named = [each for each in host.facts.interfaces if each.name in exact]
    if NCCL in variables:
        named += [each for each in host.facts.interfaces if is_chosen(variables[NCCL], each.name)]
    own = [each for each in host.facts.names.own_addresses if not is_loopback(each)]
    candidates = [*(address for each in named for address in each.addresses), *own]
    candidates += host.facts.names.listed_addresses
    # IPv4 first, as torch does; link-local addresses need a zone, which is another on each host.
    usable = [each for each in candidates if not ip_address(each.partition("%")[0]).is_link_local]
    return next((each for each in usable if ":" not in each), usable[0] if usable else None)


def is_chosen(pattern: str, name: str) -> bool:
    """Whether NCCL uses an interface: names begin with one of a list, are one of it (=), or are none of it (^)."""
    excluded, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    hit = name in words if exact else name.startswith(tuple(words))
    # A pattern of exclusion excludes loopback, too.
    return hit != excluded and not (excluded and name == "lo")


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ip_address(address.partition("%")[0]).is_loopback


DISTRIBUTION = "megatron-terapipe"
ENVIRONMENT_FILE = ".deepspeed_env"


def launching_here(*, hostfile: str | None, launcher: str, save: str | None, master_port: int) -> Launching:
    """Return a launch from this process's directory.

    Args:
        hostfile: its path; None if only this machine is checked.
        save: the directory for checkpoints; None = the working directory.
    """
    directory = os.getcwd()
    return Launching(
        hostfile=hostfile,
        launcher=launcher,
        python=sys.executable,
        project=str(Path(__file__).resolve().parents[2]),
        directory=directory,
        checkpoints=os.path.abspath(save or directory),
        save_is_given=save is not None,
        master_port=master_port,
        programs=probe.programs(),
        variables=probe.variables(),
        environment_file=environment_lines(),
        requirements=_requirements(),
    )


def environment_lines() -> tuple[str, ...] | None:
    """Return the lines of the files that DeepSpeed's launcher reads: of the home directory, then of this one."""
    name = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    lines: list[str] | None = None
    for folder in (Path.home(), Path()):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [*(lines or ()), *text.splitlines()]
    return None if lines is None else tuple(lines)


class ChangedLine(NamedTuple):
    """A line of .deepspeed_env that does not reach the ranks as it is."""

    found: str
    rule: str
    remedy: str


def line_that_changes(lines: Iterable[str]) -> ChangedLine | None:
    """Return the first such line; None if there is none.

    DeepSpeed puts a value that has other characters than a path between double quotes, as text for the shells of the
    hosts (`add_export` in deepspeed/launcher/multinode_runner.py, 0.19.8).
    """
    for number, line in enumerate(lines, start=1):
        where, (name, equals, value) = f"line {number} of {ENVIRONMENT_FILE}", line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            rule = "the launcher fails at an empty line, a comment or any other"
            return ChangedLine(f"{where} is not NAME=VALUE", rule, "remove it")
        if found := re.search(r"[\"$`\\]|^\s*'", value):
            rule = "the shells of the hosts change the value"
            found_here = f"{where} has {found[0].strip()} in the value of {name}"
            return ChangedLine(found_here, rule, "write the value itself, without quotes, variables and commands")
    return None


def _requirements() -> tuple[str, ...] | None:
    """Return the required packages of this project, without extras."""
    try:
        listed = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return None
    return tuple(each for each in listed if "extra ==" not in each)
