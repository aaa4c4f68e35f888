"""What is known of hosts before a launch. Data alone: it goes over ssh, into JSON, and into the checks.

This module travels with the probe and needs the standard library alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed for one Python.

    Attributes:
        python: path of the Python that a launch starts; None if this host has none there.
        python_version: of the Python that collected these facts.
        packages: versions of the packages that were asked for and are installed.
        apex: `nvidia`, `other` (PyPI's package of that name) or None.
        toolkit: version of CUDA's compiler; None if none was found.
        digest: of the sources of this project; None if they are not in the folder where the launch expects them.
        programs: paths of launchers that were found.
        has_folder: whether the working directory of the launch exists.
    """

    python: str | None
    python_version: str
    packages: dict[str, str]
    apex: str | None
    toolkit: str | None
    digest: str | None
    programs: dict[str, str]
    has_folder: bool


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, as its driver describes it.

    Attributes:
        name: its kind.
        memory_bytes: all of its memory.
        free_bytes: what nobody uses of it.
        processes: processes that compute on it.
        driver: version of the driver.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    processes: tuple[str, ...]
    driver: str


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What torch and DeepSpeed say once they are imported.

    Attributes:
        error: last line of what went wrong; None if nothing did.
        accelerator: DeepSpeed's, such as `cuda` or `cpu`.
        num_devices: devices that torch can use; 0 on CPUs.
        cuda: version of CUDA that torch was built for; None for a build without.
        nccl: version of NCCL; None without.
        resident_bytes: memory of the process with both loaded.
    """

    error: str | None = None
    accelerator: str | None = None
    num_devices: int = 0
    cuda: str | None = None
    nccl: str | None = None
    resident_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Cores, memory and limits of processes. A limit of None is none.

    Attributes:
        cores: that a process may use.
        memory_bytes: of the host, or of the container.
        free_memory_bytes: that a program can have without others being moved to disk.
        shared_memory_bytes: size of /dev/shm; None if there is none.
        free_shared_memory_bytes: what is free of it.
        locked_memory_bytes: memory that a process may lock into pages.
        open_files: files and connections of a process.
        processes: processes and threads of this user.
        has_infiniband: whether there is a card for RDMA.
        outgoing_ports: first and last port that the system gives to connections that ask for none; None = not known.
    """

    cores: int
    memory_bytes: int
    free_memory_bytes: int
    shared_memory_bytes: int | None
    free_shared_memory_bytes: int
    locked_memory_bytes: int | None
    open_files: int | None
    processes: int | None
    has_infiniband: bool
    outgoing_ports: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface.

    Attributes:
        name: as the system has it.
        addresses: IPv4 and IPv6.
        is_up: whether it carries packets.
        speed_mbit: of its card; None if the system does not know.
        largest_packet: bytes (MTU).
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None
    largest_packet: int


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names and addresses as one host knows them.

    Attributes:
        hostname: its own.
        own_addresses: addresses of that name, as it looks them up itself; empty if it cannot.
        listed_addresses: what `hostname -I` prints, of which DeepSpeed takes the first of the first host.
        others: addresses of each host of the hostfile; empty if it cannot look them up.
    """

    hostname: str
    own_addresses: tuple[str, ...]
    listed_addresses: tuple[str, ...]
    others: dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The directory for checkpoints, or the nearest one above it that exists.

    Attributes:
        path: of the directory that exists.
        fault: why no file can be written there; None if one can.
        free_bytes: room in it.
        sees_token: whether it has the file that the first host wrote; None if that was not tried.
    """

    path: str
    fault: str | None
    free_bytes: int
    sees_token: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a host beside that of the machine where the doctor runs.

    Attributes:
        offset_s: seconds that it is ahead.
        uncertainty_s: half of the fastest round trip.
    """

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Everything that the probe found on a host.

    Attributes:
        software: what is installed.
        devices: accelerators that the driver lists.
        resources: cores, memory and limits.
        interfaces: of its network.
        names: and addresses.
        variables: those of the environment that torch, CUDA and the network read.
        folder: for checkpoints.
    """

    software: Software
    devices: tuple[Device, ...]
    resources: Resources
    interfaces: tuple[Interface, ...]
    names: Names
    variables: dict[str, str]
    folder: Folder


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and what is known of it.

    Attributes:
        name: as the hostfile has it; `this machine` without one.
        slots: ranks that the hostfile gives it; None without one.
        failure: why the probe did not answer; None if it did.
        facts: what the probe found; None if it did not answer.
        imports: what torch and DeepSpeed say; None if they were not asked.
        clock: beside this machine's; None if it was not asked.
    """

    name: str
    slots: int | None = None
    failure: str | None = None
    facts: HostFacts | None = None
    imports: Imports | None = None
    clock: Clock | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """One try to reach a host from another.

    Attributes:
        source: the host that connects.
        target: the host that listens.
        address: that was tried.
        port: that was tried.
        is_meeting: whether it is the place where the ranks meet.
        fault: why there is no connection; None if there is.
        interface: of the source.
        round_trip_s: the fastest of some; None if it was not measured.
        bandwidth: bytes per second; None if it was not measured.
    """

    source: str
    target: str
    address: str
    port: int
    is_meeting: bool = False
    fault: str | None = None
    interface: str | None = None
    round_trip_s: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Launching:
    """The machine where the doctor runs, from which a launch would be started.

    Attributes:
        hostfile: its path; None if only this machine is looked at.
        launcher: DeepSpeed's name of it.
        python: path of the Python that the launcher starts on all hosts.
        project: folder of this project.
        directory: the working directory, which the launcher enters on all hosts.
        checkpoints: the directory to save to.
        save_is_given: whether the user named it.
        master_port: where the ranks meet.
        programs: paths of launchers that were found here.
        variables: of this shell, as far as torch, CUDA and the network read them.
        environment_file: lines of .deepspeed_env, which the launcher reads here; None if there is none.
        requirements: of this project on packages, from its metadata; None if it is not installed.
    """

    hostfile: str | None
    launcher: str
    python: str
    project: str
    directory: str
    checkpoints: str
    save_is_given: bool
    master_port: int
    programs: dict[str, str]
    variables: dict[str, str]
    environment_file: tuple[str, ...] | None = None
    requirements: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Examined:
    """All facts of one examination.

    Attributes:
        launching: the machine where the doctor runs.
        hosts: in the order of the hostfile.
        links: tries to reach one host from another.
        meeting_fault: why the place where the ranks meet could not be opened; None if it could.
    """

    launching: Launching
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = field(default=())
    meeting_fault: str | None = None

    @property
    def reached(self) -> Iterator[tuple[Host, HostFacts]]:
        """Hosts whose probe answered, with their facts."""
        return ((host, host.facts) for host in self.hosts if host.facts is not None)

    @property
    def has_python(self) -> Iterator[tuple[Host, HostFacts]]:
        """Those of them that have the Python of the launch, so that what is installed there counts."""
        return ((host, facts) for host, facts in self.reached if facts.software.python is not None)
