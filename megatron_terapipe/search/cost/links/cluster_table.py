"""The nodes of a cluster as arrays, so that what a layout makes of a hundred thousand of them is arithmetic."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.inputs.cluster import Cluster, Device

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ClusterTable:
    """The nodes of a cluster, column by column; N nodes in the order of the hostfile."""

    node_of_device: Whole
    """[devices] index of the node that each device is in."""
    devices: tuple[Device, ...]
    """The different devices."""
    device_of_node: Whole
    """[N] number among them of what each node holds."""
    inside_bandwidth: Floats
    """[N] bytes per second from one device to another of the node."""
    inside_latency_s: Floats
    """[N]."""
    network_bandwidth: Floats
    """[N] bytes per second of one network card."""
    network_latency_s: Floats
    """[N]."""
    num_network_cards: Whole
    """[N]."""

    @classmethod
    def of(cls, cluster: Cluster) -> "ClusterTable":
        """Return the table of a cluster."""
        nodes = cluster.nodes
        numbers: dict[Device, int] = {}
        device_of_node = [numbers.setdefault(node.device, len(numbers)) for node in nodes]

        def column(value: str, link: str) -> Floats:
            return np.array([getattr(getattr(node, link), value) for node in nodes], dtype=np.float64)

        return cls(
            node_of_device=np.repeat(np.arange(len(nodes)), [node.num_devices for node in nodes]),
            devices=tuple(numbers),
            device_of_node=np.array(device_of_node, dtype=np.int64),
            inside_bandwidth=column("bandwidth", "inside"),
            inside_latency_s=column("latency_s", "inside"),
            network_bandwidth=column("bandwidth", "network"),
            network_latency_s=column("latency_s", "network"),
            num_network_cards=np.array([node.num_network_cards for node in nodes], dtype=np.int64),
        )

    @cached_property
    def kind_of_node(self) -> Whole:
        """[N] number of each node's kind: nodes of a kind hold the same device, and have the same links and cards."""
        links = self.inside_bandwidth, self.inside_latency_s, self.network_bandwidth, self.network_latency_s
        rows = np.stack([self.device_of_node, *links, self.num_network_cards], axis=1)
        return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1], dtype=np.int64).reshape(-1)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return len(self.node_of_device)
