"""Seconds of collectives and of messages over the links that they cross.

A ring of n ranks sends (n - 1)/n of the bytes over each of its links, twice for an all-reduce, in as many steps
(Thakur, Rabenseifner, Gropp 2005, section 4.5; NCCL's own accounting of bus bandwidth). A ring over several nodes is
as fast as its slowest link. Its steps inside nodes wait for a latency of the inside link, those between nodes for one
of the network; NCCL climbs a tree between many nodes, so that their latencies grow with the logarithm (NVIDIA,
Massively Scale Your Deep Learning Training with NCCL 2.4).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.op_times import Grid
from megatron_terapipe.search.cost.physics import Physics

Flags = NDArray[np.bool_]


class Span(NamedTuple):
    """What the ranks of a group have between them; numbers or arrays.

    Attributes:
        size: ranks of the group.
        num_nodes: nodes that they are on.
        inside_bandwidth: bytes per second of the slowest link inside those nodes.
        inside_latency_s: of those links.
        network_bandwidth: bytes per second that the group gets of the network cards of a node, others sharing them.
        network_latency_s: of the network.
    """

    size: Grid
    num_nodes: Grid
    inside_bandwidth: Grid
    inside_latency_s: Grid
    network_bandwidth: Grid
    network_latency_s: Grid


def _ring_s(num_bytes: Grid, span: Span, physics: Physics) -> Grid:
    """Seconds of one round: every rank gets its part of the sum, or every part gets to every rank."""
    size = np.maximum(span.size, 1)
    share = num_bytes * (size - 1) / size
    inside = share / (span.inside_bandwidth * physics.inside_efficiency)
    network = share / (span.network_bandwidth * physics.network_efficiency)
    crosses = np.greater(span.num_nodes, 1)
    in_a_node = size / span.num_nodes
    steps_s = span.inside_latency_s * (in_a_node - 1) + np.where(
        crosses, span.network_latency_s * np.log2(np.maximum(span.num_nodes, 1)), 0.0
    )
    # Where each node holds one rank, nothing travels inside nodes.
    moving = np.maximum(np.where(in_a_node > 1, inside, 0.0), np.where(crosses, network, 0.0))
    return np.where(np.greater(size, 1), moving + steps_s, 0.0)


def reduce_scatter_s(num_bytes: Grid, span: Span, physics: Physics) -> Grid:
    """Seconds until each rank has its part of the sum of `num_bytes`."""
    return np.where(np.greater(span.size, 1), _ring_s(num_bytes, span, physics) + physics.collective_s, 0.0)


def all_gather_s(num_bytes: Grid, span: Span, physics: Physics) -> Grid:
    """Seconds until each rank has all `num_bytes`, of which each had a part."""
    return reduce_scatter_s(num_bytes, span, physics)


def all_reduce_s(num_bytes: Grid, span: Span, physics: Physics) -> Grid:
    """Seconds until each rank has the sum of `num_bytes`."""
    return np.where(np.greater(span.size, 1), 2 * _ring_s(num_bytes, span, physics) + physics.collective_s, 0.0)


def transfer_bandwidth(bandwidth: Grid, crosses_nodes: Grid | Flags, physics: Physics) -> Grid:
    """Bytes per second that a message between stages reaches."""
    return bandwidth * np.where(crosses_nodes, physics.transfer_network_efficiency, physics.transfer_inside_efficiency)


def transfer_s(
    num_bytes: Grid, bandwidth: Grid, latency_s: Grid, crosses_nodes: Grid | Flags, physics: Physics
) -> Grid:
    """Seconds of one message between stages.

    Args:
        num_bytes: of it.
        bandwidth: bytes per second of its link, by the data sheet.
        latency_s: of its link.
        crosses_nodes: whether the link is a network, not one inside a node.
        physics: what of them is reached.
    """
    return num_bytes / transfer_bandwidth(bandwidth, crosses_nodes, physics) + latency_s + physics.transfer_s
