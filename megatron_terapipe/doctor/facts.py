"""Facts of hosts before a launch. Data only: the answers of the probe, the JSON of the doctor, and what checks read."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed for one Python."""

    python: str | None
    """Path of the Python that a launch starts; None if this host has none there."""
    python_version: str
    """Of the Python that collected these facts."""
    packages: dict[str, str]
    """Versions of the packages that were asked for and are installed."""
    apex: str | None
    """`nvidia`, `other` (PyPI's package of that name) or None."""
    toolkit: str | None
    """Version of CUDA's compiler; None if none was found."""
    digest: str | None
    """Of the sources of this project; None if they are not in the folder where the launch expects them."""
    programs: dict[str, str]
    """Paths of launchers that were found."""
    has_folder: bool
    """Whether the working directory of the launch exists."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, as its driver describes it."""

    name: str
    """Its kind."""
    memory_bytes: int
    """All of its memory."""
    free_bytes: int
    """What nobody uses of it."""
    processes: tuple[str, ...]
    """Processes that compute on it."""
    driver: str
    """Version of the driver."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What torch and DeepSpeed say once they are imported."""

    error: str | None = None
    """Last line of what went wrong; None if nothing did."""
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
    """Cores, memory and limits of processes. A limit of None is none."""

    cores: int
    """That a process may use."""
    memory_bytes: int
    """Of the host, or of the container."""
    free_memory_bytes: int
    """That a program can have without others being moved to disk."""
    shared_memory_bytes: int | None
    """Size of /dev/shm; None if there is none."""
    free_shared_memory_bytes: int
    """What is free of it."""
    locked_memory_bytes: int | None
    """Memory that a process may lock into pages."""
    open_files: int | None
    """Files and connections of a process."""
    processes: int | None
    """Processes and threads of this user."""
    has_infiniband: bool
    """Whether there is a card for RDMA."""
    outgoing_ports: tuple[int, int] | None
    """First and last port that the system gives to connections that ask for none; None = not known."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    """As the system has it."""
    addresses: tuple[str, ...]
    """IPv4 and IPv6."""
    is_up: bool
    """Whether it carries packets."""
    speed_mbit: int | None
    """Of its card; None if the system does not know."""
    largest_packet: int
    """Bytes (MTU)."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names and addresses as one host knows them."""

    hostname: str
    """Its own."""
    own_addresses: tuple[str, ...]
    """Addresses of that name, as it looks them up itself; empty if it cannot."""
    listed_addresses: tuple[str, ...]
    """What `hostname -I` prints, of which DeepSpeed takes the first of the first host."""
    others: dict[str, tuple[str, ...]]
    """Addresses of each host of the hostfile; empty if it cannot look them up."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The directory for checkpoints, or the nearest one above it that exists."""

    path: str
    """Of the directory that exists."""
    fault: str | None
    """Why no file can be written there; None if one can."""
    free_bytes: int
    """Room in it."""
    sees_token: bool | None = None
    """Whether it has the file that the first host wrote; None if that was not tried."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a host beside that of the machine where the doctor runs."""

    offset_s: float
    """Seconds that it is ahead."""
    uncertainty_s: float
    """Half of the fastest round trip."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Everything that the probe found on a host."""

    software: Software
    """What is installed."""
    devices: tuple[Device, ...]
    """Accelerators that the driver lists."""
    resources: Resources
    """Cores, memory and limits."""
    interfaces: tuple[Interface, ...]
    """Of its network."""
    names: Names
    """And addresses."""
    variables: dict[str, str]
    """Those of the environment that torch, CUDA and the network read."""
    folder: Folder
    """For checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and what is known of it."""

    name: str
    """As the hostfile has it; `this machine` without one."""
    slots: int | None = None
    """Ranks that the hostfile gives it; None without one."""
    failure: str | None = None
    """Why the probe did not answer; None if it did."""
    facts: HostFacts | None = None
    """What the probe found; None if it did not answer."""
    imports: Imports | None = None
    """What torch and DeepSpeed say; None if they were not asked."""
    clock: Clock | None = None
    """Beside this machine's; None if it was not asked."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One try to reach a host from another."""

    source: str
    """The host that connects."""
    target: str
    """The host that listens."""
    address: str
    """That was tried."""
    port: int
    """That was tried."""
    is_meeting: bool = False
    """Whether it is the place where the ranks meet."""
    fault: str | None = None
    """Why there is no connection; None if there is."""
    interface: str | None = None
    """Of the source."""
    round_trip_s: float | None = None
    """The fastest of some; None if it was not measured."""
    bandwidth: float | None = None
    """Bytes per second; None if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Launching:
    """The machine where the doctor runs, from which a launch would be started."""

    hostfile: str | None
    """Its path; None if only this machine is looked at."""
    launcher: str
    """DeepSpeed's name of it."""
    python: str
    """Path of the Python that the launcher starts on all hosts."""
    project: str
    """Folder of this project."""
    directory: str
    """The working directory, which the launcher enters on all hosts."""
    checkpoints: str
    """The directory to save to."""
    save_is_given: bool
    """Whether the user named it."""
    master_port: int
    """Where the ranks meet."""
    programs: dict[str, str]
    """Paths of launchers that were found here."""
    variables: dict[str, str]
    """Of this shell, as far as torch, CUDA and the network read them."""
    environment_file: tuple[str, ...] | None = None
    """Lines of .deepspeed_env, which the launcher reads here; None if there is none."""
    requirements: tuple[str, ...] | None = None
    """Of this project on packages, from its metadata; None if it is not installed."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """All facts of one examination."""

    launching: Launching
    """The machine where the doctor runs."""
    hosts: tuple[Host, ...]
    """In the order of the hostfile."""
    links: tuple[Link, ...] = field(default=())
    """Tries to reach one host from another."""
    meeting_fault: str | None = None
    """Why the place where the ranks meet could not be opened; None if it could."""

    @property
    def reached(self) -> Iterator[tuple[Host, HostFacts]]:
        """Hosts whose probe answered, with their facts."""
        return ((host, host.facts) for host in self.hosts if host.facts is not None)

    @property
    def has_python(self) -> Iterator[tuple[Host, HostFacts]]:
        """Those of them that have the Python of the launch, so that what is installed there counts."""
        return ((host, facts) for host, facts in self.reached if facts.software.python is not None)
