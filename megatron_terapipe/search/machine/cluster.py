"""A cluster as data, by its data sheets: nodes of devices, links and network cards; and the object of a file for it.

`price.efficiency` has the share of these figures that is reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import ConfigError

__all__ = ["Cluster", "HostMemory", "Link", "Node"]

MOST_NODES = 100_000
"""Nodes of one entry of a file: more would be a typing error."""

MOST_DEVICES_OF_CLUSTER = 1_000_000
"""Devices of all nodes: several times as many as the largest machines have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Bandwidth and latency of a connection."""

    bandwidth: float
    """Bytes per second in one direction, by the data sheet."""
    latency_s: float
    """Time of an empty message, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Host memory of a node, which its devices share."""

    memory_bytes: float
    """Bytes of the node."""
    bandwidth: float
    """Bytes per second from each device to it, and as many back at the same time, by the data sheet."""


USUAL_HOST = HostMemory(memory_bytes=512e9, bandwidth=32e9)
"""Half a terabyte over 16 lanes of PCIe 4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine with devices of one kind."""

    name: str
    device: Device
    num_devices: int
    inside: Link
    """From one device to another of the node; each device has one such link."""
    network: Link
    """One network card, to other nodes."""
    num_network_cards: int = 1
    host: HostMemory = USUAL_HOST

    @property
    def parts(self) -> tuple[Device, int, Link, Link, int, HostMemory]:
        """All fields but the name: nodes with the same parts are of one kind."""
        return self.device, self.num_devices, self.inside, self.network, self.num_network_cards, self.host


def check_num_devices(num_devices: int, name: str) -> None:
    """Raise if a cluster has too many devices."""
    if num_devices > MOST_DEVICES_OF_CLUSTER:
        raise ConfigError(
            f"cluster {name} has {num_devices:,} devices, more than {MOST_DEVICES_OF_CLUSTER:,}: give fewer nodes, or "
            "fewer devices in each"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in the order of the hostfile; ranks fill one node after the other."""

    nodes: tuple[Node, ...]
    name: str = ""

    def __post_init__(self) -> None:
        check_num_devices(self.num_devices, self.name)

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        """Index of the node that each device is in."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.num_devices))

    @property
    def generations(self) -> set[str]:
        """Generations of its devices, as `Device.generation` has them."""
        return {node.device.generation for node in self.nodes}

    def at_most(self, num_devices: int) -> "Cluster":
        """Return a part of the cluster: its fastest nodes, whole ones while there is room, in their order.

        If not even one node has so few devices (from 1), the part is as many devices of the fastest node.
        """
        kept: dict[int, Node] = {}
        left = num_devices
        fastest_first = sorted(enumerate(self.nodes), key=lambda pair: -pair[1].device.half_flops)
        for index, node in fastest_first:
            if node.num_devices <= left:
                kept[index] = node
                left -= node.num_devices
        if not kept:
            index, node = fastest_first[0]
            kept[index] = replace(node, num_devices=num_devices)
        return Cluster(nodes=tuple(kept[index] for index in sorted(kept)), name=self.name)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are the same but for their names."""
        return len({node.parts for node in self.nodes}) == 1


def model_document(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model that differ from their defaults."""
    document = {}
    for each in fields(ModelConfig):
        value = getattr(model, each.name)
        if value is not None and each.name != "model_preset" and value != each.default:
            document[each.name] = value
    return document


def cluster_document(nodes: Sequence[Node], name: str = "") -> dict[str, Any]:
    """Return the object of a cluster file; equal nodes next to each other share an entry."""
    groups = [list(group) for _, group in groupby(nodes, key=lambda node: node.parts)]
    listed = [{"hosts": [node.name for node in group], **_described(group[0])} for group in groups]
    return {"name": name, "nodes": listed} if name else {"nodes": listed}


def _described(node: Node) -> dict[str, Any]:
    # As text with plain units every number comes back to the last bit.
    def link(each: Link) -> dict[str, Any]:
        return {"bandwidth": f"{each.bandwidth!r} B/s", "latency": f"{each.latency_s!r} s"}

    device = node.device
    return {
        "device": {
            "name": device.name,
            "memory": f"{device.memory_bytes!r} B",
            "memory_bandwidth": f"{device.memory_bandwidth!r} B/s",
            "half_flops": f"{device.half_flops!r} FLOP/s",
            "single_flops": f"{device.single_flops!r} FLOP/s",
            "is_gpu": device.is_gpu,
            **({"generation": device.generation} if device.generation else {}),
        },
        "devices": node.num_devices,
        "inside": link(node.inside),
        "network": {**link(node.network), "cards": node.num_network_cards},
        "host": {"memory": f"{node.host.memory_bytes!r} B", "bandwidth": f"{node.host.bandwidth!r} B/s"},
    }
