"""Facts of hosts before a launch: answers of the probe, input of the checks, and part of the JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, field


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
    """Model of the device."""
    memory_bytes: int
    """Total memory."""
    free_bytes: int
    """Unused memory."""
    processes: tuple[str, ...]
    """Processes that compute on it."""
    driver: str
    """Version of the driver."""


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
    """Version of NCCL; None without."""
    resident_bytes: int = 0
    """Memory of the process with both loaded."""


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
    """Free part of it."""
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
    """Name of the interface."""
    addresses: tuple[str, ...]
    """IPv4 and IPv6 addresses."""
    is_up: bool
    """Whether it is up."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Name and addresses of a host."""

    hostname: str
    """Its own name."""
    own_addresses: tuple[str, ...]
    """Addresses to which it resolves its own name; empty if it cannot."""
    listed_addresses: tuple[str, ...]
    """Output of `hostname -I`. DeepSpeed uses the first address of the first host."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The directory for checkpoints, or the nearest one above it that exists."""

    path: str
    """Path of the directory that exists."""
    fault: str | None
    """Why no file can be written there; None if one can."""
    free_bytes: int
    """Free bytes of its disk."""
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
    """Installed software."""
    devices: tuple[Device, ...]
    """Accelerators that the driver lists."""
    resources: Resources
    """Cores, memory and limits."""
    interfaces: tuple[Interface, ...]
    """Network interfaces."""
    names: Names
    """Name and addresses."""
    variables: dict[str, str]
    """Variables of the environment that torch, CUDA and the network read."""
    folder: Folder
    """Directory for checkpoints."""


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
    """Address that was tried."""
    port: int
    """Port that was tried."""
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
    """Directory for checkpoints."""
    save_is_given: bool
    """Whether `--save` named it."""
    master_port: int
    """Port of the rendezvous."""
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
    """The machine on which the doctor runs."""
    hosts: tuple[Host, ...]
    """In the order of the hostfile."""
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
