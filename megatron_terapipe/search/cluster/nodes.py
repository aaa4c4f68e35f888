"""The entries of a cluster file's `nodes`: each a group of equal nodes, or one that differs."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster import library
from megatron_terapipe.search.cluster.machine import Device, Link, Node
from megatron_terapipe.search.cluster.machines import MACHINES, Machine
from megatron_terapipe.search.reading import Fields

BANDWIDTH_UNITS = {"GBps": 1e9, "Gbps": 1e9 / 8}
MEMORY_UNITS = {"GB": 1e9, "GiB": 2.0**30}
SPEED_UNITS = {"TFLOPs": 1e12}
TIME_UNITS = {"us": 1e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes that differ by their names alone.

    Attributes:
        device: what each holds.
        num_devices: how many.
        inside: from device to device.
        network: one network card.
        num_network_cards: cards of a node.
        count: nodes.
        hosts: their names; empty = numbered.
        notes: what the file left to the library, a line each.
    """

    device: Device
    num_devices: int
    inside: Link
    network: Link
    num_network_cards: int
    count: int = 1
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
        return cls.of_machine(machine, device, (assumed("links", device, machine),))


def assumed(what: str, device: Device, machine: Machine) -> str:
    """The note that something was taken from the library."""
    return f"{what} of {device.name} nodes not given: those of a {machine.name} are taken"


def read_groups(fields: Fields) -> list[NodeGroup]:
    """Read the groups of nodes of a cluster file, changes to single hosts applied.

    Args:
        fields: the file; `nodes`, `device`, `machine` and `hosts` are asked for here.

    Raises:
        ConfigError: if a field is wrong.
    """
    overrides = fields.section("overrides") if fields.has("overrides") else None
    groups: list[NodeGroup] = []
    for entry in fields.sections("nodes"):
        group = _read_group(entry, fields)
        entry.finish()
        groups += _with_overrides(group, overrides, fields)
    if overrides is not None:
        overrides.finish()
    return groups


def _with_overrides(group: NodeGroup, overrides: Fields | None, file: Fields) -> list[NodeGroup]:
    """Take the hosts that `overrides` speaks of out of their group."""
    if overrides is None or not any(host in overrides.values for host in group.hosts):
        return [group]
    parts = []
    for host in group.hosts:
        part = replace(group, count=1, hosts=(host,))
        if overrides.has(host):
            entry = overrides.section(host)
            part = replace(_read_group(entry, file, base=part), count=1, hosts=(host,))
            entry.finish()
        parts.append(part)
    return parts


def _read_group(entry: Fields, file: Fields, base: NodeGroup | None = None) -> NodeGroup:
    hosts = _read_hosts(entry) if base is None else ()
    count = len(hosts) if hosts else (entry.whole("count", 1) if base is None else 1)
    if base is None and not hosts and entry.has("name"):
        name = entry.text("name")
        hosts = (name,) if count == 1 else tuple(f"{name}-{index + 1}" for index in range(count))
    group = base or _base(entry, file)
    if base is not None and entry.has("device"):
        group = replace(group, device=read_device(entry, "device"))
    given = {name: entry.has(name) for name in ("devices", "inside", "network")}
    inside = read_link(entry, "inside", group.inside) if given["inside"] else group.inside
    network, cards = group.network, group.num_network_cards
    if given["network"]:
        network, cards = _read_network(entry, group)
    elif entry.has("network_cards"):
        cards = entry.whole("network_cards")
    devices = entry.whole("devices", group.num_devices)
    notes = group.notes
    if given["inside"] and given["network"] and given["devices"]:
        notes = ()
    return replace(
        group,
        num_devices=devices,
        inside=inside,
        network=network,
        num_network_cards=cards,
        count=count,
        hosts=hosts,
        notes=notes,
    )


def _base(entry: Fields, file: Fields) -> NodeGroup:
    """What an entry says nothing else about: its machine, or the usual machine of its device."""
    place = entry if entry.has("machine") or entry.has("device") else file
    if place.has("machine"):
        machine = library.machine(place.text("machine"), place.place("machine"))
        if place.has("device"):
            return NodeGroup.of_machine(machine, read_device(place, "device"))
        if machine.device is None:
            raise place.fault("machine", "is a machine for any device", "say which in the field device")
        return NodeGroup.of_machine(machine, library.device(machine.device))
    if not place.has("device"):
        raise ConfigError(f"{entry.place('device')} is missing: give the name of a device, its fields, or a machine")
    device = read_device(place, "device")
    machine = library.usual_machine(device.name)
    named = [name for name in ("devices", "inside", "network") if not entry.has(name)]
    return NodeGroup.of_machine(machine, device, (assumed(" and ".join(named) or "links", device, machine),))


def read_device(fields: Fields, name: str) -> Device:
    """Read a device: its name in the library, or its fields, some of which the library may fill in.

    Raises:
        ConfigError: if the library does not know it, or a field is wrong.
    """
    if isinstance(fields.raw(name), str):
        return library.device(fields.text(name), fields.place(name))
    given = fields.section(name)
    known: Device | None = None
    if given.has("like"):
        known = library.device(given.text("like"), given.place("like"))
    required: dict[str, Any] = (
        {}
        if known is None
        else {
            "memory": known.memory_bytes,
            "memory_bandwidth": known.memory_bandwidth,
            "half_flops": known.half_flops,
            "single_flops": known.single_flops,
        }
    )

    def quantity(field: str, kind: str, units: dict[str, float]) -> float:
        return given.quantity(field, kind, units=units, **({"default": required[field]} if required else {}))

    half = quantity("half_flops", "speed", SPEED_UNITS)
    device = Device(
        name=given.text("name", known.name if known else "device"),
        memory_bytes=quantity("memory", "memory", MEMORY_UNITS),
        memory_bandwidth=quantity("memory_bandwidth", "bandwidth", BANDWIDTH_UNITS),
        half_flops=half,
        single_flops=quantity("single_flops", "speed", SPEED_UNITS),
        is_gpu=given.flag("is_gpu", known.is_gpu if known else True),
    )
    given.finish()
    return device


def read_link(fields: Fields, name: str, usual: Link) -> Link:
    """Read a link: its bandwidth as text, or an object of bandwidth and latency.

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


def _link(given: Fields, usual: Link) -> Link:
    return Link(
        bandwidth=given.quantity("bandwidth", "bandwidth", usual.bandwidth, units=BANDWIDTH_UNITS),
        latency_s=given.quantity("latency", "time", usual.latency_s, units=TIME_UNITS),
    )


def _read_network(entry: Fields, group: NodeGroup) -> tuple[Link, int]:
    """A network card and the number of them. A bare bandwidth is that of the only card."""
    if isinstance(entry.raw("network"), str):
        return read_link(entry, "network", group.network), entry.whole("network_cards", 1)
    given = entry.section("network")
    cards = given.whole("cards", 1 if given.has("bandwidth") else group.num_network_cards)
    link = _link(given, group.network)
    given.finish()
    return link, cards


def _read_hosts(entry: Fields) -> tuple[str, ...]:
    if not entry.has("hosts"):
        return ()
    value = entry.raw("hosts")
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise entry.fault("hosts", "is not a list of host names", 'write it as ["worker-1", "worker-2"]')
    if entry.has("count") and entry.whole("count") != len(value):
        raise entry.fault("count", f"contradicts hosts, which names {len(value)}", "drop one of them")
    return tuple(value)
