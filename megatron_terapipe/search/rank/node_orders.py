"""Orders of the nodes in the hostfile, which decide the node of each pipeline rank: ranks fill nodes in that order.

Nodes that are the same but for their names need no order among themselves, so an order is a sequence of node kinds.
There are few of those on small clusters, and all are tried. On large ones nodes of a kind stay together, in every order
of the kinds, because a stage that spans two kinds is as slow as the slower one and as small as the smaller one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import factorial, prod

from megatron_terapipe.search.machine.cluster import Cluster, Node

MOST_ORDERS = 6
"""Orders that are tried for every layout: all orders of two and two nodes, or of three kinds that stay together."""

MOST_KINDS = 3
"""Kinds that are put in every order on large clusters, those with most devices; others go next to the most similar."""


def kind_key(node: Node) -> tuple[object, ...]:
    """Key of a node's kind, without its name; nodes sort by it, those with the most computing and memory first."""
    device = node.device
    return (
        -node.num_devices * device.half_flops,
        -device.memory_bytes,
        -device.memory_bandwidth,
        device.single_flops,
        device.name,
        device.is_gpu,
        node.num_devices,
        -node.inside.bandwidth,
        node.inside.latency_s,
        -node.network.bandwidth * node.num_network_cards,
        node.network.latency_s,
        node.num_network_cards,
    )


def node_orders(cluster: Cluster) -> list[Cluster]:
    """The orders of nodes to try. The same nodes in any order give the same list, but for names of equal nodes."""
    kinds = _by_kind(cluster)
    counts = [len(nodes) for nodes in kinds]
    distinct = factorial(sum(counts)) // prod(map(factorial, counts)) if sum(counts) <= 64 else MOST_ORDERS + 1
    if len(kinds) > 1 and distinct <= MOST_ORDERS:
        sequences = sorted(set(permutations(kind for kind, count in enumerate(counts) for _ in range(count))))
    else:
        sequences = [
            tuple(kind for family in order for kind in family for _ in range(counts[kind]))
            for order in permutations(_families(kinds))
        ]
    orders = []
    for sequence in sequences:
        waiting = [iter(nodes) for nodes in kinds]
        orders.append(replace(cluster, nodes=tuple(next(waiting[kind]) for kind in sequence)))
    return orders


def placement_of(ordered: Cluster, cluster: Cluster, world_size: int) -> tuple[int, ...] | None:
    """Device of the cluster for each rank if ranks fill the same nodes in another order; None if both are equal."""
    if ordered.nodes == cluster.nodes:
        return None
    free: dict[Node, deque[int]] = {}
    first_device = 0
    for node in cluster.nodes:
        free.setdefault(node, deque()).append(first_device)
        first_device += node.num_devices
    devices: list[int] = []
    for node in ordered.nodes:
        first_device = free[node].popleft()
        devices += range(first_device, first_device + node.num_devices)
    placement = tuple(devices[:world_size])
    return None if placement == tuple(range(world_size)) else placement


def _by_kind(cluster: Cluster) -> list[list[Node]]:
    """Nodes of each kind, the kinds sorted, the nodes of a kind as the cluster has them."""
    kinds: dict[tuple[object, ...], list[Node]] = {}
    for node in cluster.nodes:
        kinds.setdefault(kind_key(node), []).append(node)
    return [kinds[key] for key in sorted(kinds)]


def _families(kinds: Sequence[Sequence[Node]]) -> list[list[int]]:
    """Kinds, by number, that stay next to each other: one with many devices, and those most similar to it."""

    def devices(kind: int) -> int:
        return sum(node.num_devices for node in kinds[kind])

    def flops(kind: int) -> float:
        return kinds[kind][0].device.half_flops

    leaders = sorted(range(len(kinds)), key=lambda kind: (-devices(kind), kind))[:MOST_KINDS]
    families = {leader: [leader] for leader in sorted(leaders)}
    for kind in range(len(kinds)):
        if kind not in families:
            families[min(sorted(leaders), key=lambda leader: abs(flops(leader) - flops(kind)))].append(kind)
    return [sorted(family) for family in families.values()]
