"""Seconds of collectives and of messages over the links that they cross.

A ring of n ranks sends (n - 1)/n of the bytes over each of its links, twice for an all-reduce, in as many steps
(Thakur, Rabenseifner, Gropp 2005, section 4.5; NCCL's own accounting of bus bandwidth). A ring over several nodes is
as fast as its slowest link. Its steps inside nodes wait for a latency of the inside link, those between nodes for one
of the network; NCCL climbs a tree between many nodes, so that their latencies grow with the logarithm (NVIDIA,
Massively Scale Your Deep Learning Training with NCCL 2.4).

All-reduces between two nodes do not ring: each node sums inside and exchanges its sum with the other, so that a network
card carries the bytes once, not 2 (n - 1)/n times (NCCL's trees; github.com/NVIDIA/nccl-tests/issues/196). Among more
nodes a tree carries as much as a ring.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.links.rank_groups import GroupTopology
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import ScalarOrArray
from megatron_terapipe.search.op_times.reduction_factors import carried_by_network, reduction_factor

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def _round_s(
    num_bytes: ScalarOrArray,
    topology: GroupTopology,
    efficiency: HardwareEfficiency,
    network_share: ScalarOrArray | None = None,
) -> ScalarOrArray:
    """Seconds of one round: every rank gets its part of the sum, or every part gets to every rank.

    Args:
        num_bytes: bytes of the whole sum.
        network_share: part of the bytes that a node's network cards carry; None = as in a ring.
    """
    size = np.maximum(topology.size, 1)
    ring_share = (size - 1) / size
    inside = num_bytes * ring_share / (topology.inside_bandwidth * efficiency.inside_efficiency)
    carried = num_bytes * (ring_share if network_share is None else network_share)
    network = carried / (topology.network_bandwidth * efficiency.network_efficiency)
    crosses = np.greater(topology.num_nodes, 1)
    in_a_node = size / topology.num_nodes
    steps_s = topology.inside_latency_s * (in_a_node - 1) + np.where(
        crosses, topology.network_latency_s * np.log2(np.maximum(topology.num_nodes, 1)), 0.0
    )
    # Where each node holds one rank, nothing travels inside nodes.
    moving = np.maximum(np.where(in_a_node > 1, inside, 0.0), np.where(crosses, network, 0.0))
    learned = np.where(crosses, 1.0, reduction_factor(efficiency.reductions, num_bytes, size))
    return np.where(np.greater(size, 1), (moving + steps_s) * learned, 0.0)


def reduce_scatter_s(
    num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency
) -> ScalarOrArray:
    """Seconds until each rank has its part of the sum of `num_bytes`; arguments broadcast.

    Args:
        num_bytes: bytes of the whole sum.
    """
    return np.where(
        np.greater(topology.size, 1), _round_s(num_bytes, topology, efficiency) + efficiency.collective_s, 0.0
    )


def all_gather_s(num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds until each rank has all `num_bytes`, of which each had a part; arguments broadcast.

    Args:
        num_bytes: bytes of the whole.
    """
    return reduce_scatter_s(num_bytes, topology, efficiency)


def all_reduce_s(num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds until each rank has the sum of `num_bytes`; arguments broadcast.

    Args:
        num_bytes: bytes of the sum.
    """
    size = np.maximum(topology.size, 1)
    round_s = _round_s(num_bytes, topology, efficiency, carried_by_network(size, topology.num_nodes))
    return np.where(np.greater(topology.size, 1), 2 * round_s + efficiency.collective_s, 0.0)


def all_to_all_s(num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds until each rank has a part of the numbers of every other; arguments broadcast.

    Of the n parts of its bytes a rank keeps one, sends those for its own node over the link inside, and the others over
    the network cards, which carry those of all its ranks. All messages are posted at once, so their latencies do not
    add up.

    Args:
        num_bytes: bytes of one rank, its own part among them.
    """
    size = np.maximum(topology.size, 1)
    in_a_node = size / topology.num_nodes
    part = num_bytes / size
    inside = (in_a_node - 1) * part / (topology.inside_bandwidth * efficiency.inside_efficiency)
    leaving = in_a_node * (size - in_a_node) * part
    network = leaving / (topology.network_bandwidth * efficiency.network_efficiency)
    inside_s = np.where(in_a_node > 1, inside + topology.inside_latency_s, 0.0)
    network_s = np.where(np.greater(topology.num_nodes, 1), network + topology.network_latency_s, 0.0)
    return np.where(np.greater(size, 1), np.maximum(inside_s, network_s) + efficiency.collective_s, 0.0)


def transfer_bandwidth(
    bandwidth: ScalarOrArray, crosses_nodes: ScalarOrArray | Flags, efficiency: HardwareEfficiency
) -> ScalarOrArray:
    """Bytes per second that a message between stages reaches; arguments broadcast.

    Args:
        bandwidth: bytes per second of the link.
        crosses_nodes: whether the message goes to another node.
    """
    return bandwidth * np.where(
        crosses_nodes, efficiency.transfer_network_efficiency, efficiency.transfer_inside_efficiency
    )


def transfer_s(
    num_bytes: ScalarOrArray,
    bandwidth: ScalarOrArray,
    latency_s: ScalarOrArray,
    crosses_nodes: ScalarOrArray | Flags,
    efficiency: HardwareEfficiency,
) -> ScalarOrArray:
    """Seconds of one message between stages; arguments broadcast.

    Args:
        num_bytes: its bytes.
        bandwidth: bytes per second of its link, by the data sheet.
        latency_s: seconds of latency of its link.
        crosses_nodes: whether the link is a network, not one inside a node.
    """
    return num_bytes / transfer_bandwidth(bandwidth, crosses_nodes, efficiency) + latency_s + efficiency.transfer_s


class Messages(NamedTuple):
    """Messages between neighbouring stages, of B boundaries and S token slices; other arrays that broadcast will do."""

    num_bytes: Floats
    """[B, S] of the activation of one token slice."""
    bandwidth: Floats
    """[B] bytes per second of the link, by the data sheet."""
    latency_s: Floats
    """[B]."""
    crosses_nodes: NDArray[np.bool_]
    """[B] whether it is the network."""


def sending_s(sent: Messages, topology: GroupTopology, efficiency: HardwareEfficiency, *, in_parts: bool) -> Floats:
    """Return the seconds of messages, until all tensor-parallel ranks of the next stage have them; arguments broadcast.

    Args:
        in_parts: whether each tensor-parallel rank sends its part, which the receivers gather.
    """
    num_bytes, bandwidth, latency_s, crosses_nodes = sent
    if not in_parts:
        return np.asarray(transfer_s(num_bytes, bandwidth, latency_s, crosses_nodes, efficiency), dtype=float)
    part = transfer_s(num_bytes / topology.size, bandwidth, latency_s, crosses_nodes, efficiency)
    return np.asarray(part + all_gather_s(num_bytes, topology, efficiency), dtype=float)
