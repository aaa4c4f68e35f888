"""Where it is computed: nodes, their devices, and the links inside and between them."""

from megatron_terapipe.search.cluster.machine import Cluster, Device, Link, Node

__all__ = ["Cluster", "Device", "Link", "Node"]
