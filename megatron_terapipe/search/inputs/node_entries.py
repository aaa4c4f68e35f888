"""The entries of a cluster file's `nodes`: each is a group of equal nodes, with its device, links and network cards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs import library
from megatron_terapipe.search.inputs.cluster import Device, Link, Node
from megatron_terapipe.search.inputs.documents import Fields
from megatron_terapipe.search.inputs.library import MACHINES, Machine

BANDWIDTH_UNITS = {"GBps": 1e9, "Gbps": 1e9 / 8}
MEMORY_UNITS = {"GB": 1e9, "GiB": 2.0**30}
SPEED_UNITS = {"TFLOPs": 1e12}
TIME_UNITS = {"us": 1e-6}
"""Endings of fields that hold bare numbers, and what one of that unit is."""


def read_device(fields: Fields, name: str) -> tuple[Device, Machine]:
    """Read a device, and find the machine it is usually in.

    Args:
        fields: what has the field.
        name: the field. It holds a name in the library, or an object: `memory`, `memory_bandwidth`, `half_flops`,
            `single_flops`, `name`, `is_gpu`; with `like`, a name in the library, all of these may be left out.

    Raises:
        ConfigError: if the library does not know it, or a field is wrong.
    """
    if isinstance(fields.raw(name), str):
        found = library.device(fields.text(name), fields.place(name))
        return found, library.usual_machine(found.name)
    given = fields.section(name)
    known = library.device(given.text("like"), given.place("like")) if given.has("like") else None

    def quantity(field: str, kind: str, units: dict[str, float], usual: float) -> float:
        if known is None:
            return given.quantity(field, kind, units=units)
        return given.quantity(field, kind, usual, units=units)

    base = known or Device(name="device", memory_bytes=0, memory_bandwidth=0, half_flops=0, single_flops=0)
    device = Device(
        name=given.text("name", base.name),
        memory_bytes=quantity("memory", "memory", MEMORY_UNITS, base.memory_bytes),
        memory_bandwidth=quantity("memory_bandwidth", "bandwidth", BANDWIDTH_UNITS, base.memory_bandwidth),
        half_flops=quantity("half_flops", "speed", SPEED_UNITS, base.half_flops),
        single_flops=quantity("single_flops", "speed", SPEED_UNITS, base.single_flops),
        is_gpu=given.flag("is_gpu", base.is_gpu),
    )
    given.finish()
    return device, library.usual_machine(base.name if known else device.name)


def read_link(fields: Fields, name: str, usual: Link) -> Link:
    """Read a link: its bandwidth as text, or an object of `bandwidth` and `latency`.

    Args:
        fields: what has the field.
        name: the field.
        usual: what it is where the field leaves something out.
    """
    if isinstance(fields.raw(name), str):
        return Link(bandwidth=fields.quantity(name, "bandwidth"), latency_s=usual.latency_s)
    given = fields.section(name)
    link = _link(given, usual)
    given.finish()
    return link


def read_network(fields: Fields, name: str, usual: Link, usual_cards: int) -> tuple[Link, int]:
    """Read the network of a node: as for `read_link`, of one card, and the number of `cards`.

    Where the bandwidth is given and the number is not, there is one card.
    """
    if isinstance(fields.raw(name), str):
        return read_link(fields, name, usual), 1
    given = fields.section(name)
    says_bandwidth = any(each.startswith("bandwidth") for each in given.values)
    cards = given.whole("cards", 1 if says_bandwidth else usual_cards)
    link = _link(given, usual)
    given.finish()
    return link, cards


def _link(given: Fields, usual: Link) -> Link:
    return Link(
        bandwidth=given.quantity("bandwidth", "bandwidth", usual.bandwidth, units=BANDWIDTH_UNITS),
        latency_s=given.quantity("latency", "time", usual.latency_s, units=TIME_UNITS),
    )


MOST_NODES, MOST_DEVICES = 100_000, 1024
"""Nodes of one entry, and devices of a node: more would be a slip of the hand, and take long to be noticed."""

PARTS = {"devices": "number of devices", "inside": "links inside", "network": "network"}
"""Fields that the library may fill in, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes that differ by their names alone.

    Attributes:
        device: what each holds.
        num_devices: how many.
        inside: from device to device.
        network: one network card.
        num_network_cards: cards of a node.
        hosts: names of the nodes.
        notes: what the file left to the library, a line each.
    """

    device: Device
    num_devices: int
    inside: Link
    network: Link
    num_network_cards: int
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def node(self, name: str, *, num_devices: int | None = None) -> Node:
        """One of the nodes.

        Args:
            name: its host name.
            num_devices: devices of it, where it is not full.
        """
        return Node(
            name=name,
            device=self.device,
            num_devices=num_devices or self.num_devices,
            inside=self.inside,
            network=self.network,
            num_network_cards=self.num_network_cards,
        )

    @classmethod
    def of_machine(cls, machine: Machine, device: Device, notes: tuple[str, ...] = ()) -> "NodeGroup":
        """A node of the library, perhaps with another device."""
        if library.is_guess(device.name):
            notes += (f"the figures of {device.name} are a guess, no data sheet: describe it, or measure it",)
        return cls(
            device=device,
            num_devices=machine.num_devices,
            inside=machine.inside,
            network=machine.network,
            num_network_cards=machine.num_network_cards,
            notes=notes,
        )

    @classmethod
    def of_library(cls, name: str, where: str) -> "NodeGroup":
        """A node by the name of a machine, or of a device in its usual machine.

        Raises:
            ConfigError: if the library knows neither.
        """
        if name.lower() in MACHINES:
            machine = MACHINES[name.lower()]
            if machine.device is not None:
                return cls.of_machine(machine, library.device(machine.device))
        device = library.device(name, where)
        machine = library.usual_machine(name)
        return cls.of_machine(machine, device, (assumed(["links"], device, machine),))


def assumed(missing: Sequence[str], device: Device, machine: Machine) -> str:
    """The note that something was taken from the library."""
    what = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
    return f"{what} of {device.name} nodes not given: those of a {machine.name} are taken"


def read_groups(file: Fields) -> list[NodeGroup]:
    """Read the groups of nodes of a cluster file, `overrides` of single hosts applied.

    An entry has `count` equal nodes, called `name` with a number, or the `hosts` of its list; and `device`, `machine`,
    `devices`, `inside`, `network`. `device` and `machine` may also stand once, for the whole file.

    Raises:
        ConfigError: if a field is wrong.
    """
    overrides = file.section("overrides") if file.has("overrides") else None
    groups: list[NodeGroup] = []
    num_nodes = 0
    for entry in file.sections("nodes"):
        hosts = _read_hosts(entry, first=num_nodes + 1)
        group = replace(_with_parts(_base(entry, file), entry), hosts=hosts)
        entry.finish()
        num_nodes += len(hosts)
        groups += [group] if overrides is None else _with_overrides(group, overrides)
    if overrides is not None:
        overrides.finish()
    return groups


def _with_overrides(group: NodeGroup, overrides: Fields) -> list[NodeGroup]:
    """Take the hosts that `overrides` speaks of out of their group."""
    if not any(overrides.has(host) for host in group.hosts):
        return [group]
    parts = []
    for host in group.hosts:
        part = replace(group, hosts=(host,))
        if overrides.has(host):
            entry = overrides.section(host)
            if entry.has("device"):
                part = replace(part, device=read_device(entry, "device")[0])
            part = _with_parts(part, entry)
            entry.finish()
        parts.append(part)
    return parts


def _with_parts(group: NodeGroup, entry: Fields) -> NodeGroup:
    """A group with what an entry says of its nodes."""
    if entry.has("devices"):
        group = replace(group, num_devices=entry.whole("devices", most=MOST_DEVICES))
    if entry.has("inside"):
        group = replace(group, inside=read_link(entry, "inside", group.inside))
    if entry.has("network"):
        network, cards = read_network(entry, "network", group.network, group.num_network_cards)
        group = replace(group, network=network, num_network_cards=cards)
    return group


def _base(entry: Fields, file: Fields) -> NodeGroup:
    """What an entry says nothing else about: its machine, or the usual machine of its device."""
    place = entry if entry.has("machine") or entry.has("device") else file
    device, usual = read_device(place, "device") if place.has("device") else (None, None)
    if place.has("machine"):
        machine = library.machine(place.text("machine"), place.place("machine"))
        if device is None and machine.device is None:
            raise place.fault("machine", "is a machine for any device", "say which in the field device")
        return NodeGroup.of_machine(machine, device or library.device(str(machine.device)))
    if device is None or usual is None:
        raise ConfigError(f"{entry.place('device')} is missing: give the name of a device, its fields, or a machine")
    missing = [words for name, words in PARTS.items() if not entry.has(name)]
    return NodeGroup.of_machine(usual, device, (assumed(missing, device, usual),) if missing else ())


def _read_hosts(entry: Fields, *, first: int) -> tuple[str, ...]:
    """Names of the nodes of an entry, which are numbered from `first` where it gives none."""
    if not entry.has("hosts"):
        count = entry.whole("count", 1, most=MOST_NODES)
        if not entry.has("name"):
            return tuple(f"node-{index}" for index in range(first, first + count))
        name = entry.text("name")
        return (name,) if count == 1 else tuple(f"{name}-{index + 1}" for index in range(count))
    value = entry.raw("hosts")
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise entry.fault("hosts", "is not a list of host names", 'write it as ["worker-1", "worker-2"]')
    if entry.has("count") and entry.whole("count") != len(value):
        raise entry.fault("count", f"contradicts hosts, which names {len(value)}", "drop one of them")
    return tuple(value)
