"""Clusters from files: JSON or YAML, or a hostfile.

    file -> entries (pydantic) -> groups of equal nodes, completed from the library -> Cluster, notes

Notes name the fields that the library filled in, and figures that look like another unit, which are used as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.parsing import check_host_name
from megatron_terapipe.devices import GENERATION_NAMES, Device
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.hostfile import MOST_SLOTS, hostfile_notes, is_hostfile, parse_hostfile
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.cluster import (
    MOST_DEVICES_OF_CLUSTER,
    MOST_NODES,
    Cluster,
    HostMemory,
    Link,
    Node,
    check_num_devices,
)
from megatron_terapipe.search.machine.documents import parse_text, suggestion
from megatron_terapipe.search.machine.entries import (
    Bandwidth,
    Entry,
    FlopsRate,
    Memory,
    OrText,
    Text,
    Time,
    expected,
    fault,
    is_number,
    place,
    read_entry,
    short_for,
)
from megatron_terapipe.search.machine.library import FOR_ANY_DEVICE, GIGABIT, GIGABYTE, MACHINES

__all__ = ["parse_cluster", "read_cluster", "read_cluster_with_notes"]

CLOSE = 0.03
"""Relative difference up to which a figure is taken for a rounded one."""

LINE_RATES = (1, 2.5, 5, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800)
"""Gbit/s of network cards that are sold."""


def inside_notes(device: Device, inside: Link) -> Iterator[str]:
    """Yield a note if a link inside a node is faster than in the device's usual machine."""
    if not _is_known(device):
        return
    machine = library.usual_machine(device.name)
    usual, given = machine.inside.bandwidth / GIGABYTE, inside.bandwidth / GIGABYTE
    if _is_close(given, 2 * usual):
        yield (
            f"inside {given:g} GB/s of {device.name} nodes is the sum of both directions, as links are sold: "
            f"bandwidths count one direction, so write {usual:g} GB/s"
        )
    elif given > 2 * usual:
        yield (
            f"inside {given:g} GB/s of {device.name} nodes is {given / usual:.2g} times the {usual:g} GB/s of a "
            f"{machine.name} in one direction: check it"
        )


def network_notes(network: Link) -> Iterator[str]:
    """Yield a note if no network card has such a bandwidth, as if bits were given as bytes."""
    given = network.bandwidth / GIGABIT
    if given > LINE_RATES[-1] * (1 + CLOSE):
        yield (
            f"network {given:g} Gbit/s ({given / 8:g} GB/s) is more than one card has: give the bandwidth of one card, "
            "their number in cards, and mind that cards are sold in Gbit/s"
        )
    elif not _is_line_rate(given) and _is_line_rate(8 * given):
        yield (
            f"network {given:g} Gbit/s is the rate of no card, and {given:g} GB/s is the rate of a card of "
            f"{8 * given:g} Gbit/s: check the unit"
        )


def device_notes(device: Device) -> Iterator[str]:
    """Yield a note if a device of the library has twice its FLOP/s of dense products, or if its figures are a guess."""
    if _is_known(device):
        dense = library.device(device.name).half_flops / 1e12
        if _is_close(device.half_flops / 1e12, 2 * dense):
            yield (
                f"half_flops {device.half_flops / 1e12:g} TFLOP/s of {device.name} counts sparsity: write {dense:g} "
                "TFLOP/s, of dense products"
            )
    if library.is_guess(device.name):
        yield f"the figures of {device.name} are a guess, no data sheet: describe it, or measure it"


def _is_known(device: Device) -> bool:
    return library.find_device(device.name) is not None and not library.is_guess(device.name)


def _is_close(given: float, figure: float) -> bool:
    return abs(given / figure - 1) <= CLOSE


def _is_line_rate(gigabits: float) -> bool:
    return any(_is_close(gigabits, rate) for rate in LINE_RATES)


NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]
DeviceCount = Annotated[int, Field(ge=1, le=MOST_SLOTS)]


def _link(value: object) -> object:
    """Read text as a link of that bandwidth; refuse a number, which has no unit."""
    if is_number(value):
        raise ValueError("is a number without a unit: write it as 100 Gbit/s or 25 GB/s")
    return {"bandwidth": value} if isinstance(value, str) else value


Described = TypeVar("Described", Device, Link, HostMemory)

_UNKNOWN_DEVICE = Device(name="device", memory_bytes=0.0, memory_bandwidth=0.0, half_flops=0.0, single_flops=0.0)
_IN_BASE_UNITS = {"memory": "memory_bytes", "latency": "latency_s"}


def _with_fields(usual: Described, entry: Entry) -> Described:
    """Return `usual` with the fields that an entry of a file gives."""
    given = entry.model_dump(exclude_none=True, exclude={"like", "cards"})
    return replace(usual, **{_IN_BASE_UNITS.get(name, name): value for name, value in given.items()})


class DeviceEntry(Entry):
    """A device; with `like`, a name in the library, the other fields are optional."""

    like: Text | None = None
    name: Text | None = None
    memory: Memory | None = None
    memory_bandwidth: Bandwidth | None = None
    half_flops: FlopsRate | None = None
    single_flops: FlopsRate | None = None
    is_gpu: bool | None = None
    generation: Literal[tuple(GENERATION_NAMES)] | None = None  # type: ignore[valid-type]

    def read(self, where: str) -> tuple[Device, Node]:
        """Return the device, and the machine it is usually in; `where` is the place of the entry, for errors."""
        known = None if self.like is None else library.device(self.like, where)
        if known is None:
            for field in ("memory", "memory_bandwidth", "half_flops", "single_flops"):
                if getattr(self, field) is None:
                    raise ConfigError(f"{where}.{field} is missing: give {expected(DeviceEntry, field)}")
        device = _with_fields(known or _UNKNOWN_DEVICE, self)
        return device, library.usual_machine(known.name if known else device.name)


class LinkEntry(Entry):
    """A link; omitted fields have the values of the library."""

    bandwidth: Bandwidth | None = None
    latency: Time | None = None


class NetworkEntry(LinkEntry):
    """One network card, and the number of cards: if not given, as many as the named machine has, otherwise one."""

    cards: DeviceCount | None = None


class HostEntry(Entry):
    """Host memory of a node; omitted fields have the values of the library."""

    memory: Memory | None = None
    bandwidth: Bandwidth | None = None


DeviceOrName = Annotated[DeviceEntry, short_for("like"), OrText("Name of a device of the library.")]


class NodeParts(Entry):
    """The given parts of a node."""

    device: DeviceOrName | None = None
    devices: DeviceCount | None = None
    inside: Annotated[LinkEntry, BeforeValidator(_link), OrText("Its bandwidth.")] | None = None
    network: Annotated[NetworkEntry, BeforeValidator(_link), OrText("Bandwidth of a card.")] | None = None
    host: HostEntry | None = None


class NodeEntry(NodeParts):
    """A group of equal nodes: `count` of them, called `name` with a number, or the `hosts` of a list."""

    machine: Text | None = None
    hosts: list[Text] | None = Field(None, min_length=1)
    count: NodeCount | None = None
    name: Text | None = None


class ClusterEntry(Entry):
    """A cluster file; `device` and `machine` are for nodes that name neither."""

    name: Text | None = None
    device: DeviceOrName | None = None
    machine: Text | None = None
    nodes: list[NodeEntry] = Field(min_length=1)
    overrides: dict[str, NodeParts] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that differ by their names only."""

    node: Node
    """One of them, without a name."""
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Values taken from the library, a line each."""

    @classmethod
    def of_machine(cls, machine: Node, device: Device, *notes: str) -> "NodeGroup":
        """Return a node of the library, perhaps with another device."""
        return cls(replace(machine, device=device), notes=(*notes, *device_notes(device)))

    @classmethod
    def of_library(cls, name: str) -> "NodeGroup":
        """Return a node by the name of a machine, or of a device in its usual machine."""
        if name.lower() in MACHINES.keys() - FOR_ANY_DEVICE:
            machine = MACHINES[name.lower()]
            return cls.of_machine(machine, machine.device)
        device = library.device(name, "--device")
        machine = library.usual_machine(name)
        return cls.of_machine(machine, device, library_note(["links"], device, machine))


def library_note(missing: Sequence[str], device: Device, machine: Node) -> str:
    """Return the note that something was taken from the library."""
    omitted = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
    return f"{omitted} of {device.name} nodes not given: those of a {machine.name} are taken"


def read_groups(cluster: ClusterEntry, file: str) -> list[NodeGroup]:
    """Return the groups of nodes of a cluster file, `overrides` of single hosts applied."""
    groups: list[NodeGroup] = []
    num_nodes = 0
    for index, entry in enumerate(cluster.nodes):
        where = place(file, "nodes", index)
        hosts = _hosts(entry, where, first=num_nodes + 1)
        named = entry.machine is not None or (entry.device is None and cluster.machine is not None)
        group = replace(_with_parts(_base(entry, where, cluster, file), entry, keeps_cards=named), hosts=hosts)
        num_nodes += len(hosts)
        if num_nodes > MOST_DEVICES_OF_CLUSTER:
            raise ConfigError(f"{place(file, 'nodes')}: more than {MOST_DEVICES_OF_CLUSTER:,} nodes: give fewer")
        groups += _with_overrides(group, cluster.overrides, file)
    hosts = tuple(host for group in groups for host in group.hosts)
    unknown = next((host for host in cluster.overrides if host not in hosts), None)
    if unknown is not None:
        raise ConfigError(f"{place(file, 'overrides', unknown)} is not a host: {suggestion(unknown, hosts)}")
    return groups


def _with_overrides(group: NodeGroup, overrides: dict[str, NodeParts], file: str) -> list[NodeGroup]:
    """Split the hosts of `overrides` from their group."""
    if not any(host in overrides for host in group.hosts):
        return [group]
    parts = []
    for host in group.hosts:
        part, where = replace(group, hosts=(host,)), place(file, "overrides", host)
        if host in overrides:
            entry = overrides[host]
            if entry.device is not None:
                part = replace(part, node=replace(part.node, device=entry.device.read(f"{where}.device")[0]))
            part = _with_parts(part, entry)
        parts.append(part)
    return parts


def _with_parts(group: NodeGroup, entry: NodeParts, *, keeps_cards: bool = False) -> NodeGroup:
    """Return a group with the parts that an entry gives.

    `keeps_cards`: whether a network with only a bandwidth has the cards of the machine that the file names, not one.
    """
    node, notes = group.node, list(group.notes)
    if entry.devices is not None:
        node = replace(node, num_devices=entry.devices)
    if entry.inside is not None:
        node = replace(node, inside=_with_fields(node.inside, entry.inside))
        notes += inside_notes(node.device, node.inside)
    if entry.network is not None:
        given, network = entry.network, _with_fields(node.network, entry.network)
        cards = node.num_network_cards if keeps_cards or given.bandwidth is None else 1
        if keeps_cards and cards > 1 and given.bandwidth is not None and given.cards is None:
            notes.append(f"the network is read as each of the {cards} cards of the machine: give cards if not")
        node = replace(node, network=network, num_network_cards=given.cards or cards)
        notes += network_notes(network)
    if entry.host is not None:
        node = replace(node, host=_with_fields(node.host, entry.host))
    return replace(group, node=node, notes=tuple(notes))


def _base(entry: NodeEntry, where: str, cluster: ClusterEntry, file: str) -> NodeGroup:
    of: NodeEntry | ClusterEntry = entry
    at = f"{where}."
    if entry.machine is None and entry.device is None:
        of, at = cluster, place(file) + ": "
    device, usual = of.device.read(f"{at}device") if of.device is not None else (None, None)
    if of.machine is not None:
        machine = library.machine(of.machine, f"{at}machine")
        if device is None and machine.name in FOR_ANY_DEVICE:
            raise fault(f"{at}machine", of.machine, "is a machine for any device", "name one in the field device")
        return NodeGroup.of_machine(machine, device or machine.device)
    if device is None or usual is None:
        raise ConfigError(f"{where}.device is missing: give the name of a device, its fields, or a machine")
    parts = {"devices": "number of devices", "inside": "links inside", "network": "network"}
    missing = [words for name, words in parts.items() if getattr(entry, name) is None]
    return NodeGroup.of_machine(usual, device, *([library_note(missing, device, usual)] if missing else []))


def _hosts(entry: NodeEntry, where: str, *, first: int) -> tuple[str, ...]:
    """Names of the nodes of an entry, which are numbered from `first` where it gives none."""
    if entry.hosts is not None:
        if entry.count not in (None, len(entry.hosts)):
            problem = f"contradicts hosts, which names {len(entry.hosts)}"
            raise fault(f"{where}.count", entry.count, problem, "drop one of them")
        return tuple(check_host_name(host, f"{where}.hosts[{index}]") for index, host in enumerate(entry.hosts))
    count = entry.count or 1
    if entry.name is None:
        return tuple(f"node-{index}" for index in range(first, first + count))
    check_host_name(entry.name, f"{where}.name")
    return (entry.name,) if count == 1 else tuple(f"{entry.name}-{index + 1}" for index in range(count))


def read_cluster(path: str, *, device: str | None = None) -> Cluster:
    """Read a cluster; see `read_cluster_with_notes`."""
    return read_cluster_with_notes(path, device=device)[0]


def read_cluster_with_notes(path: str, *, device: str | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster, and the notes about its default values."""
    if not Path(path).exists():
        raise ConfigError(
            f"{path} is not a file: give a hostfile, of lines HOST slots=N, with --device; or a file of nodes, such as "
            "examples/clusters/a100-64.json"
        )
    text = read_text(path)
    if not text.strip():
        raise ConfigError(
            f"{path} is empty: write nodes as docs/reference/search-inputs.md shows, or hostfile lines, HOST slots=N"
        )
    if is_hostfile(text, path):
        if device is None:
            raise ConfigError(
                f"{path} is a hostfile, which names no device: add --device NAME, such as --device A100-80GB"
            )
        hosts, group = parse_hostfile(text, path), NodeGroup.of_library(device)
        nodes = tuple(replace(group.node, name=host.name, num_devices=host.slots) for host in hosts if host.slots)
        return Cluster(nodes=nodes, name=path.rpartition("/")[2]), (*hostfile_notes(hosts), *group.notes)
    if device is not None:
        raise ConfigError(f"--device {device} is for hostfiles, and {path} names its devices: drop the flag")
    return parse_cluster(parse_text(text, path), path)


def parse_cluster(document: object, where: str) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster from the object of a file."""
    cluster = read_entry(ClusterEntry, document, where)
    groups, name = read_groups(cluster, where), cluster.name or where.rpartition("/")[2].rpartition(".")[0]
    # Before any node is made.
    check_num_devices(sum(len(group.hosts) * group.node.num_devices for group in groups), name)
    nodes = {}
    for host, node in ((host, group.node) for group in groups for host in group.hosts):
        if host in nodes:
            raise ConfigError(f"cluster {name}: host {host} appears twice: give each node another name")
        nodes[host] = replace(node, name=host)
    notes = [note for each in groups for note in each.notes]
    return Cluster(nodes=tuple(nodes.values()), name=name), tuple(dict.fromkeys(notes))
