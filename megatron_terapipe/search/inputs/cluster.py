"""A cluster as data: what each node is made of, as data sheets say it. What of that is reached, `cost` knows."""

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_terapipe.devices import Device as Device

MOST_NODES, MOST_DEVICES = 100_000, 1024
"""Nodes of one entry of a file, and devices of a node: more would be a slip of the hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way for bytes.

    Attributes:
        bandwidth: bytes per second in one direction, by the data sheet.
        latency_s: time of an empty message, in seconds.
    """

    bandwidth: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine with devices of one kind.

    Attributes:
        name: its host name, or what the cluster file calls it.
        device: what it holds.
        num_devices: how many of them.
        inside: from one device to another of the node; each device has one such link.
        network: one network card, to other nodes.
        num_network_cards: cards, which all devices of the node share.
    """

    name: str
    device: Device
    num_devices: int
    inside: Link
    network: Link
    num_network_cards: int = 1


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes in the order of the hostfile; ranks fill one node after the other.

    Attributes:
        nodes: all of them.
        name: for tables.
    """

    nodes: tuple[Node, ...]
    name: str = ""

    @cached_property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def node_of_device(self) -> tuple[int, ...]:
        """Index of the node that each device is in."""
        return tuple(index for index, node in enumerate(self.nodes) for _ in range(node.num_devices))

    def at_most(self, num_devices: int) -> "Cluster":
        """Return a part of the cluster: its fastest nodes, whole ones while there is room, in their order.

        If not even one node has so few devices, the part is as many devices of the fastest node.

        Args:
            num_devices: devices of the part at most; from 1.
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

        def parts(node: Node) -> tuple[object, ...]:
            return node.device, node.num_devices, node.inside, node.network, node.num_network_cards

        return len({parts(node) for node in self.nodes}) == 1
