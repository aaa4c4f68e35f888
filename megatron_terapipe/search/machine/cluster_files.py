"""Clusters from files: JSON or YAML, or a hostfile.

    file -> entries (pydantic) -> nodes, completed from the library -> Cluster, notes

Notes name the fields that the library filled in, and figures that look like another unit, which are used as they are.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

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
    place,
    read_entry,
)
from megatron_terapipe.search.machine.library import FOR_ANY_DEVICE, GIGABIT, GIGABYTE, MACHINES

__all__ = ["parse_cluster", "read_cluster", "read_cluster_with_notes"]

CLOSE = 0.03
"""Relative difference up to which a figure is taken for a rounded one."""

LINE_RATES = (1, 2.5, 5, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800)
"""Gbit/s of network cards that are sold."""


def unit_notes(node: Node, given: "NodeParts") -> Iterator[str]:
    """Yield notes about figures of a node that look like another unit or are a guess; links only if given."""
    device, inside, network = node.device, node.inside.bandwidth / GIGABYTE, node.network.bandwidth / GIGABIT
    machine, is_known = library.usual_machine(device.name), False
    if library.is_guess(device.name):
        yield f"the figures of {device.name} are a guess, no data sheet: describe it, or measure it"
    elif (known := library.find_device(device.name)) is not None:
        dense, is_known = known.device.half_flops / 1e12, True
        if _is_close(device.half_flops / 1e12, 2 * dense):
            yield (
                f"half_flops {device.half_flops / 1e12:g} TFLOP/s of {device.name} counts sparsity: write {dense:g} "
                "TFLOP/s, of dense products"
            )
    usual = machine.inside.bandwidth / GIGABYTE
    if given.inside is not None and is_known:
        if _is_close(inside, 2 * usual):
            yield (
                f"inside {inside:g} GB/s of {device.name} nodes is the sum of both directions, as links are sold: "
                f"bandwidths count one direction, so write {usual:g} GB/s"
            )
        elif inside > 2 * usual:
            yield (
                f"inside {inside:g} GB/s of {device.name} nodes is {inside / usual:.2g} times the {usual:g} GB/s of a "
                f"{machine.name} in one direction: check it"
            )
    if given.network is not None:
        if network > LINE_RATES[-1] * (1 + CLOSE):
            yield (
                f"network {network:g} Gbit/s ({network / 8:g} GB/s) is more than one card has: give the bandwidth of "
                "one card, their number in cards, and mind that cards are sold in Gbit/s"
            )
        elif not _is_line_rate(network) and _is_line_rate(8 * network):
            yield (
                f"network {network:g} Gbit/s is the rate of no card, and {network:g} GB/s is the rate of a card of "
                f"{8 * network:g} Gbit/s: check the unit"
            )


def _is_close(given: float, figure: float) -> bool:
    return abs(given / figure - 1) <= CLOSE


def _is_line_rate(gigabits: float) -> bool:
    return any(_is_close(gigabits, rate) for rate in LINE_RATES)


NodeCount = Annotated[int, Field(ge=1, le=MOST_NODES)]
DeviceCount = Annotated[int, Field(ge=1, le=MOST_SLOTS)]


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


DeviceOrName = Annotated[DeviceEntry, OrText("like", "Name of a device of the library.")]


class NodeParts(Entry):
    """The given parts of a node."""

    device: DeviceOrName | None = None
    devices: DeviceCount | None = None
    inside: Annotated[LinkEntry, OrText("bandwidth", "Its bandwidth.")] | None = None
    network: Annotated[NetworkEntry, OrText("bandwidth", "Bandwidth of a card.")] | None = None
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


def _node(entry: NodeEntry, where: str, cluster: ClusterEntry, file: str) -> tuple[Node, list[str]]:
    """Return a node of an entry, without a name, and the notes about it."""
    of: NodeEntry | ClusterEntry = entry
    at, notes, cards = f"{where}.", [], 1
    if entry.machine is None and entry.device is None:
        of, at = cluster, place(file) + ": "
    device, usual = of.device.read(f"{at}device") if of.device is not None else (None, None)
    if of.machine is not None:
        usual = library.machine(of.machine, f"{at}machine")
        if device is None and usual.name in FOR_ANY_DEVICE:
            raise fault(f"{at}machine", of.machine, "is a machine for any device", "name one in the field device")
        given, cards = entry.network, usual.num_network_cards
        if cards > 1 and given is not None and given.bandwidth is not None and given.cards is None:
            notes.append(f"the network is read as each of the {cards} cards of the machine: give cards if not")
    elif device is None or usual is None:
        raise ConfigError(f"{where}.device is missing: give the name of a device, its fields, or a machine")
    else:
        parts = {"devices": "number of devices", "inside": "links inside", "network": "network"}
        if missing := [words for name, words in parts.items() if getattr(entry, name) is None]:
            omitted = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
            notes.append(f"{omitted} of {device.name} nodes not given: those of a {usual.name} are taken")
    node = _with_parts(replace(usual, device=device or usual.device), entry, cards=cards)
    return node, [*notes, *unit_notes(node, entry)]


def _with_parts(node: Node, given: NodeParts, *, cards: int) -> Node:
    """Return a node with the parts that an entry gives; `cards`: of a network of which only the bandwidth is given."""
    changes: dict[str, Any] = {}
    if given.devices is not None:
        changes["num_devices"] = given.devices
    for name, entry in (("inside", given.inside), ("network", given.network), ("host", given.host)):
        if entry is not None:
            changes[name] = _with_fields(getattr(node, name), entry)
    if (network := given.network) is not None:
        usual = node.num_network_cards if network.bandwidth is None else cards
        changes["num_network_cards"] = network.cards or usual
    return replace(node, **changes)


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
        is_machine, hosts = device.lower() in MACHINES.keys() - FOR_ANY_DEVICE, parse_hostfile(text, path)
        kind = {"machine": device} if is_machine else {"device": library.device(device, "--device").name}
        nodes = [
            {"hosts": [host.name for host in alike], "devices": slots, **kind}
            for slots, alike in groupby(hosts, key=lambda host: host.slots)
            if slots
        ]
        cluster, notes = parse_cluster({"name": path.rpartition("/")[2], "nodes": nodes}, path)
        return cluster, (*hostfile_notes(hosts), *notes)
    if device is not None:
        raise ConfigError(f"--device {device} is for hostfiles, and {path} names its devices: drop the flag")
    return parse_cluster(parse_text(text, path), path)


def parse_cluster(document: object, where: str) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster from the object of a file, and the notes about its default values."""
    entry = read_entry(ClusterEntry, document, where)
    name = entry.name or where.rpartition("/")[2].rpartition(".")[0]
    groups: list[tuple[Node, tuple[str, ...]]] = []
    notes: list[str] = []
    num_nodes = 0
    for index, each in enumerate(entry.nodes):
        at = place(where, "nodes", index)
        hosts = _hosts(each, at, first=num_nodes + 1)
        node, of_node = _node(each, at, entry, where)
        groups.append((node, hosts))
        notes += of_node
        num_nodes += len(hosts)
        if num_nodes > MOST_DEVICES_OF_CLUSTER:
            raise ConfigError(f"{place(where, 'nodes')}: more than {MOST_DEVICES_OF_CLUSTER:,} nodes: give fewer")
    # Before any node is made.
    check_num_devices(sum(len(hosts) * node.num_devices for node, hosts in groups), name)
    nodes: dict[str, Node] = {}
    for node, host in ((node, host) for node, hosts in groups for host in hosts):
        if host in nodes:
            raise ConfigError(f"cluster {name}: host {host} appears twice: give each node another name")
        part = node
        if (given := entry.overrides.get(host)) is not None:
            if given.device is not None:
                part = replace(node, device=given.device.read(f"{place(where, 'overrides', host)}.device")[0])
            part = _with_parts(part, given, cards=1)
            notes += unit_notes(part, given)
        nodes[host] = replace(part, name=host)
    unknown = next((host for host in entry.overrides if host not in nodes), None)
    if unknown is not None:
        raise ConfigError(f"{place(where, 'overrides', unknown)} is not a host: {suggestion(unknown, nodes)}")
    return Cluster(nodes=tuple(nodes.values()), name=name), tuple(dict.fromkeys(notes))
