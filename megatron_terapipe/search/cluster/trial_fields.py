"""The `cluster` object of published trials: devices of one kind on equal nodes, in a few flat fields.

`device`, `num_devices` (or `num_nodes`), `devices_per_node`, `intra_node_GBps` (from a device to another, in one
direction) and `inter_node_Gbps` (all network cards of a node together).
"""

from math import ceil

from megatron_terapipe.search.cluster.machine import Cluster, Link
from megatron_terapipe.search.cluster.machines import GIGABIT, GIGABYTE
from megatron_terapipe.search.cluster.node_parts import read_device
from megatron_terapipe.search.cluster.nodes import MOST_DEVICES, MOST_NODES, NodeGroup, assumed
from megatron_terapipe.search.reading import Fields


def is_trial_form(fields: Fields) -> bool:
    """Whether an object describes a cluster by flat fields."""
    return "nodes" not in fields.values and "device" in fields.values


def read_trial_form(fields: Fields) -> tuple[Cluster, tuple[str, ...]]:
    """Read such an object. Fields that mean nothing here are left to the caller: files of others have more.

    A node has as many network cards as the line rate of those of the device's usual machine needs to make its sum.

    Returns:
        The cluster, and a line for each link that the library had to say.

    Raises:
        ConfigError: if a field is wrong.
    """
    device, machine = read_device(fields, "device")
    per_node = fields.whole("devices_per_node", machine.num_devices, most=MOST_DEVICES)
    if fields.has("num_nodes"):
        num_devices = fields.whole("num_devices", fields.whole("num_nodes", most=MOST_NODES) * per_node)
        if num_devices > fields.whole("num_nodes", most=MOST_NODES) * per_node:
            raise fields.fault("num_devices", "is more than num_nodes x devices_per_node", "change one of them")
    else:
        num_devices = fields.whole("num_devices", most=MOST_NODES)
    inside, network, cards = machine.inside, machine.network, machine.num_network_cards
    missing = []
    if fields.has("intra_node_GBps"):
        inside = Link(bandwidth=fields.number("intra_node_GBps") * GIGABYTE, latency_s=inside.latency_s)
    elif min(per_node, num_devices) > 1:
        missing.append("links inside")
    if fields.has("inter_node_Gbps"):
        total = fields.number("inter_node_Gbps") * GIGABIT
        cards = fields.whole("network_cards", max(1, ceil(total / network.bandwidth - 1e-9)))
        network = Link(bandwidth=total / cards, latency_s=network.latency_s)
    elif num_devices > per_node:
        missing.append("network")
    group = NodeGroup(
        device=device,
        num_devices=per_node,
        inside=inside,
        network=network,
        num_network_cards=cards,
        notes=(assumed(missing, device, machine),) if missing else (),
    )
    name = fields.text("name", f"{num_devices} x {device.name}")
    sizes = [min(per_node, num_devices - first) for first in range(0, num_devices, per_node)]
    nodes = tuple(group.node(f"node-{index}", num_devices=size) for index, size in enumerate(sizes, start=1))
    return Cluster(nodes=nodes, name=name), group.notes
