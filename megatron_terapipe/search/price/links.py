"""Links between devices: the links that the groups of a layout cross, and the seconds of collectives and messages.

Ranks run over tensor fastest, then sequence, data and pipe, and fill nodes in the order of the hostfile, or as a
placement assigns them. A node's network cards carry the traffic of every group that leaves it at the same time.

On a mixed cluster the replicas of a pipeline may be on unlike nodes. Within an iteration none waits for another:
`by_replica` returns the groups of one kind of replica at a time.

A ring of n ranks sends (n - 1)/n of the bytes over each of its links, twice for an all-reduce, in as many steps
(Thakur, Rabenseifner, Gropp 2005, section 4.5; NCCL's own accounting of bus bandwidth). A ring over several nodes is
as fast as its slowest link. All-reduces climb a tree between many nodes, so that their latencies grow with the
logarithm (NVIDIA, Massively Scale Your Deep Learning Training with NCCL 2.4).

All-reduces between two nodes do not ring: each node sums inside and exchanges its sum with the other, so that a
network card carries the bytes once, not 2 (n - 1)/n times (NCCL's trees; github.com/NVIDIA/nccl-tests/issues/196).
Among more nodes a tree carries as much as a ring. Both reach the same share of a card: published measurements show no
common difference (NVIDIA/nccl issues 209, 330 and 527, nccl-tests issue 22).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, carried_by_network, reduction_factor
from megatron_terapipe.search.price.layer_times import ScalarOrArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ClusterTable:
    """The nodes of a cluster, column by column; N nodes in the order of the hostfile."""

    node_of_device: Whole
    """[devices] index of the node that each device is in."""
    devices: tuple[Device, ...]
    device_of_node: Whole
    """[N] index into `devices` of each node's device."""
    inside_bandwidth: Floats
    inside_latency_s: Floats
    network_bandwidth: Floats
    network_latency_s: Floats
    num_network_cards: Whole

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


FASTEST_PCIE = 64e9
"""Bytes per second in one direction of 16 lanes of PCIe 5."""


class GroupTopology(NamedTuple):
    """Number of ranks and nodes of a group, and the links between them.

    Numbers, or arrays: in `RankGroups` [P], the slowest group of each pipeline rank.
    """

    size: ScalarOrArray
    num_nodes: ScalarOrArray
    """Nodes that they are on."""
    inside_bandwidth: ScalarOrArray
    """Bytes per second of the slowest link inside those nodes."""
    inside_latency_s: ScalarOrArray
    network_bandwidth: ScalarOrArray
    """Bytes per second that the group gets of the network cards of a node, others sharing them."""
    network_latency_s: ScalarOrArray

    def at(self, index: Any) -> "GroupTopology":
        """Return some of the groups: the arrays at an index of numpy, in its shape; numbers as they are, [...]."""
        return GroupTopology(*(part if np.ndim(part) == 0 else np.asarray(part)[index] for part in self))

    @property
    def is_switched(self) -> "NDArray[np.bool_]":
        """Whether all ranks of a group [...] are on one node, with links faster than PCIe between them."""
        return np.equal(self.num_nodes, 1) & np.greater(self.inside_bandwidth, FASTEST_PCIE)

    def every(self, stride: ScalarOrArray) -> "GroupTopology":
        """Return the groups of every `stride`-th rank of these, which use the links at the same time."""
        return self._replace(size=self.size / stride, network_bandwidth=self.network_bandwidth / stride)


ALONE = GroupTopology(1, 1.0, 1.0, 0.0, 1.0, 0.0)
"""A group of one rank, without messages."""


class ShardLinks(NamedTuple):
    """Links of the ranks with the same weights."""

    group: GroupTopology
    """Between those that divide states."""
    copies: GroupTopology = ALONE
    """Between those with the same part."""


class LayerLinks(NamedTuple):
    """Links between the ranks that share a layer."""

    tensor: GroupTopology
    sequence: GroupTopology = ALONE
    expert: GroupTopology = ALONE


class RankKind(NamedTuple):
    """Pipeline ranks that compute alike."""

    ranks: Whole
    """[n] which they are."""
    devices: tuple[Device, ...]
    links: LayerLinks


class BoundaryLinks(NamedTuple):
    """Links between a pipeline rank and the next, the slowest of all pairs; numbers or arrays.

    In `RankGroups` [P]; entry P - 1 is from the last rank to the first.
    """

    bandwidth: ScalarOrArray
    """Bytes per second that one pair gets, by the data sheet."""
    latency_s: ScalarOrArray
    crosses_nodes: ScalarOrArray | NDArray[np.bool_]

    def at(self, index: Any) -> "BoundaryLinks":
        """Return the links of some boundaries: the arrays at an index of numpy, in its shape [...]."""
        return BoundaryLinks(*(np.asarray(part)[index] for part in self))


@dataclass(frozen=True)
class RankGroups:
    """The groups of a layout on a cluster."""

    cluster: ClusterTable
    layout: ParallelLayout
    placement: Sequence[int] | None = None
    """Device of the cluster for each rank; None = in the order of the hostfile."""
    replicas: tuple[int, ...] | None = None
    """Data-parallel ranks of which devices, tensor-parallel groups and boundaries count; None = all. The others use
    links at the same time nevertheless."""

    def __post_init__(self) -> None:
        world, devices = self.layout.world_size, self.cluster.num_devices
        if world > devices:
            raise ConfigError(
                f"strategy: data x sequence x tensor x pipeline parallel size is {world}, and the cluster has "
                f"{devices} devices: make one of them smaller"
            )
        if self.placement is not None:
            places = set(self.placement)
            if len(self.placement) != world or len(places) != world or not places <= set(range(devices)):
                raise ConfigError(
                    f"strategy: placement does not name {world} different devices of 0..{devices - 1}: "
                    "give one for each rank, or null"
                )

    @cached_property
    def nodes(self) -> Whole:
        """[P, D, R, T] node of each rank, R those that share the tokens of a token slice."""
        of_device = self.cluster.node_of_device
        placed = of_device[: self.layout.world_size] if self.placement is None else of_device[list(self.placement)]
        layout = self.layout
        of_replica = layout.sequence_parallel_size, layout.tensor_parallel_size
        return placed.reshape(layout.pipeline_parallel_size, layout.data_parallel_size, *of_replica)

    @cached_property
    def _nodes(self) -> Whole:
        """[P or 1, D, R, T] the same of the ranks whose links differ: the first where each fills like nodes."""
        cluster, layout = self.cluster, self.layout
        sizes = np.bincount(cluster.node_of_device)
        of_rank = layout.world_size // layout.pipeline_parallel_size
        alike = cluster.kind_of_node.max() == 0 and sizes.min() == sizes.max() and of_rank % sizes[0] == 0
        return self.nodes[:1] if alike and self.placement is None else self.nodes

    @cached_property
    def by_replica(self) -> "tuple[RankGroups, ...]":
        """These groups once for each kind of replica; replicas of a kind are on like nodes, stage by stage.

        Links of a kind are its slowest. Where all replicas are alike, that is these groups themselves.
        """
        kinds = self.cluster.kind_of_node
        if kinds.max() == 0 or self.layout.expert_parallel_size > 1:
            return (self,)  # Replicas that share experts wait for each other in every layer.
        of_replica = np.swapaxes(kinds[self.nodes], 0, 1).reshape(self.layout.data_parallel_size, -1)
        found, kind_of_replica = np.unique(of_replica, axis=0, return_inverse=True)
        if len(found) == 1:
            return (self,)
        members = (np.flatnonzero(kind_of_replica.reshape(-1) == kind) for kind in range(len(found)))
        return tuple(replace(self, replicas=tuple(each.tolist())) for each in members)

    @property
    def _counting(self) -> Any:
        return slice(None) if self.replicas is None else list(self.replicas)

    @cached_property
    def devices(self) -> tuple[tuple[Device, ...], ...]:
        """The different devices of each pipeline rank; all of them wait for the slowest."""
        stages = self.layout.pipeline_parallel_size
        kinds = self.cluster.devices
        if len(kinds) == 1:
            return (kinds,) * stages
        here = self.nodes[:, self._counting].reshape(stages, -1)
        present = np.zeros((stages, len(kinds)), dtype=bool)
        present[np.arange(stages)[:, None], self.cluster.device_of_node[here]] = True
        return tuple(tuple(kinds[kind] for kind in np.flatnonzero(row)) for row in present)

    @cached_property
    def smallest(self) -> tuple[Device, ...]:
        """The device with the least memory of each pipeline rank."""
        return tuple(min(devices, key=lambda device: device.memory_bytes) for devices in self.devices)

    @cached_property
    def kinds(self) -> tuple[RankKind, ...]:
        """Pipeline ranks by their devices and links; ranks of a kind share the times of their layers."""
        ranks = len(self.devices)
        columns = [np.broadcast_to(part, ranks).tolist() for links in self.layer_links(slice(None)) for part in links]
        found: dict[tuple[object, ...], list[int]] = {}
        for rank, key in enumerate(zip(self.devices, *columns, strict=True)):
            found.setdefault(key, []).append(rank)
        firsts = [alike[0] for alike in found.values()]
        return tuple(
            RankKind(np.array(alike), self.devices[first], self.layer_links(first))
            for first, alike in zip(firsts, found.values(), strict=True)
        )

    @cached_property
    def tensor(self) -> GroupTopology:
        """Tensor-parallel groups."""
        size = self.layout.tensor_parallel_size
        return self._links(self._nodes.reshape(-1, size), counted=self._counted(self.layout.sequence_parallel_size))

    @cached_property
    def sequence(self) -> GroupTopology:
        """Groups of sequence-parallel ranks."""
        groups = np.swapaxes(self._nodes, 2, 3).reshape(-1, self.layout.sequence_parallel_size)
        return self._links(groups, counted=self._counted(self.layout.tensor_parallel_size))

    def layer_links(self, rank: int | slice) -> LayerLinks:
        """Links between the ranks that share the layers of a pipeline rank, or of several."""
        layout, shared = self.layout, [ALONE, ALONE]
        if layout.sequence_parallel_size > 1:
            shared[0] = self.sequence.at(rank)
        if layout.expert_parallel_size > 1:
            shared[1] = self.expert.at(rank)
        return LayerLinks(self.tensor.at(rank), *shared)

    @cached_property
    def expert(self) -> GroupTopology:
        """Groups of expert-parallel ranks: neighbours of a stage."""
        return self._links(self._nodes.reshape(-1, self.layout.expert_parallel_size))

    @cached_property
    def expert_copies(self) -> GroupTopology:
        """Groups of ranks with the same experts, over which their gradients are reduced."""
        size = self.layout.expert_parallel_size
        blocks = self._nodes.reshape(len(self._nodes), -1, size)
        return self._links(np.swapaxes(blocks, 1, 2).reshape(-1, blocks.shape[1]))

    @cached_property
    def data(self) -> GroupTopology:
        """Groups of ranks with the same weights, over which gradients are reduced: data- and sequence-parallel ones."""
        return self._links(np.moveaxis(self._nodes, 3, 1).reshape(-1, self.layout.num_weight_copies))

    @cached_property
    def _known_shards(self) -> "dict[int, ShardLinks]":
        return {self.layout.num_weight_copies: ShardLinks(self.data)}

    def shards(self, size: int | None) -> "ShardLinks":
        """Links between ranks that divide states, `size` neighbours of those with the same weights; None = all."""
        size = size or self.layout.num_weight_copies
        if size not in self._known_shards:
            members = np.moveaxis(self._nodes, 3, 1).reshape(-1, self.layout.num_weight_copies // size, size)
            copies = np.swapaxes(members, 1, 2).reshape(-1, members.shape[1])
            self._known_shards[size] = ShardLinks(self._links(members.reshape(-1, size)), self._links(copies))
        return self._known_shards[size]

    def _counted(self, groups_of_replica: int) -> NDArray[np.bool_] | None:
        """[groups] which groups are of the replicas that count, of so many in each stage of a replica; None = all."""
        if self.replicas is None:
            return None
        sizes = self.layout.pipeline_parallel_size, self.layout.data_parallel_size, groups_of_replica
        counted = np.zeros(sizes, dtype=bool)
        counted[:, self.replicas] = True
        return counted

    @cached_property
    def ends(self) -> GroupTopology:
        """The first and the last pipeline rank, where they share a weight; one entry."""
        pairs = np.stack([self.nodes[0].reshape(-1), self.nodes[-1].reshape(-1)], axis=1)
        return self._links(pairs, num_stages=1)

    @cached_property
    def pipe(self) -> BoundaryLinks:
        """Neighbouring pipeline ranks."""
        stages = len(self._nodes)
        of_stages = self.nodes.reshape(self.layout.pipeline_parallel_size, -1)
        here, there = of_stages[:stages], np.roll(of_stages, -1, axis=0)[:stages]
        apart = here != there
        nodes = self.cluster
        inside, latency_s = nodes.inside_bandwidth, nodes.inside_latency_s
        bandwidth = np.where(apart, np.inf, np.minimum(inside[here], inside[there]))
        latency = np.where(
            apart,
            np.maximum(nodes.network_latency_s[here], nodes.network_latency_s[there]),
            np.maximum(latency_s[here], latency_s[there]),
        )
        # Pairs that leave, or come to, the same node at once share its cards; no pair fills more than one.
        for ends in (here, there):
            places = ends - ends.min(axis=1, keepdims=True)
            places = (places + (places.max() + 1) * np.arange(stages)[:, None])[apart]
            share = nodes.num_network_cards[ends[apart]] / np.bincount(places)[places]
            share = nodes.network_bandwidth[ends[apart]] * np.minimum(share, 1.0)
            bandwidth[apart] = np.minimum(bandwidth[apart], share)
        if self.replicas is not None:
            bandwidth, latency, apart = (
                each.reshape(self.nodes.shape)[:, self._counting].reshape(stages, -1)
                for each in (bandwidth, latency, apart)
            )
        of_boundaries = bandwidth.min(axis=1), latency.max(axis=1), apart.any(axis=1)
        return BoundaryLinks(*(np.repeat(each, len(self.nodes) // stages) for each in of_boundaries))

    def _links(
        self, groups: Whole, num_stages: int | None = None, counted: NDArray[np.bool_] | None = None
    ) -> GroupTopology:
        """Links of groups, given as [groups, members] nodes, pipeline rank after pipeline rank.

        All of them use the links; only those `counted` are in the result, as many of each pipeline rank.
        """
        num_ranks, num_stages = num_stages or self.layout.pipeline_parallel_size, num_stages or len(self._nodes)
        nodes, ranks_on_node, num_nodes = _parts_on_nodes(groups)
        cluster = self.cluster
        leaves = np.repeat(num_nodes > 1, num_nodes)
        # Groups that leave a node at once share its cards in equal parts, and no rank drives more than one card.
        cards = cluster.num_network_cards
        sharing = np.bincount(nodes[leaves], minlength=len(cards))
        share = cluster.network_bandwidth[nodes] * np.minimum((cards / np.maximum(sharing, 1))[nodes], ranks_on_node)
        if counted is not None:
            of_counted = np.repeat(counted.reshape(-1), num_nodes)
            nodes, share = nodes[of_counted], share[of_counted]
            num_nodes = num_nodes[counted.reshape(-1)]
        first_of_stage = (np.cumsum(num_nodes) - num_nodes)[:: len(num_nodes) // num_stages]

        def of_stages(combine: np.ufunc, values: Floats) -> Floats:
            """Combine values of [parts] stage by stage: [P]."""
            each = combine.reduceat(values, first_of_stage, dtype=np.float64)
            return np.repeat(each, num_ranks // num_stages)

        return GroupTopology(
            groups.shape[1],
            np.repeat(num_nodes.reshape(num_stages, -1).max(axis=1).astype(np.float64), num_ranks // num_stages),
            of_stages(np.minimum, cluster.inside_bandwidth[nodes]),
            of_stages(np.maximum, cluster.inside_latency_s[nodes]),
            of_stages(np.minimum, share),
            of_stages(np.maximum, cluster.network_latency_s[nodes]),
        )


def _parts_on_nodes(groups: Whole) -> tuple[Whole, Whole, Whole]:
    """The parts of groups [groups, members] that are on one node each, group by group, no more of them than ranks.

    They are [parts] nodes, [parts] ranks of the group on each, and [groups] nodes of each group.
    """
    num_groups, size = groups.shape
    ordered = np.sort(groups, axis=1, kind="stable")  # in one pass, as ranks mostly fill nodes in order
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.flatnonzero(begins)
    num_nodes = begins.sum(axis=1)
    return ordered.ravel()[first], np.diff(first, append=num_groups * size), num_nodes


FILLING_BYTES = 8 * 2**20
"""Bytes of a message that fill half of NCCL's chunks, which grow with the message."""


def _round_s(
    num_bytes: ScalarOrArray,
    topology: GroupTopology,
    efficiency: HardwareEfficiency,
    network_share: ScalarOrArray | None = None,
    messages: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Seconds of one round: every rank gets its part of the sum, or every part gets to every rank.

    A ring takes a step for each other rank; an all-reduce over nodes is a tree, as deep as the logarithm of the nodes
    (github.com/NVIDIA/nccl, src/graph/tuning.cc: rings are the algorithm of reduce-scatter and all-gather).

    Args:
        network_share: part of the bytes that a node's network cards carry, in a tree of nodes; None = a ring.
        messages: number of messages that the bytes are divided into.
    """
    size = np.maximum(topology.size, 1)
    ring_share = (size - 1) / size
    inside = num_bytes * ring_share / (topology.inside_bandwidth * efficiency.inside_efficiency)
    carried = num_bytes * (ring_share if network_share is None else network_share)
    network = carried / (topology.network_bandwidth * efficiency.network_efficiency)
    crosses = np.greater(topology.num_nodes, 1)
    in_a_node = size / topology.num_nodes
    nodes = np.maximum(topology.num_nodes, 1)
    inside_steps, network_steps = in_a_node - 1, np.log2(nodes)
    if network_share is None:
        inside_steps, network_steps = size - nodes, nodes - 1
    filling_s = efficiency.collective_fill_s * num_bytes / (num_bytes + messages * FILLING_BYTES)
    steps_s = messages * (
        topology.inside_latency_s * inside_steps
        + np.where(crosses, topology.network_latency_s * network_steps, 0.0)
        + filling_s
    )
    # With one rank on each node, there are no messages inside nodes.
    moving = np.maximum(np.where(in_a_node > 1, inside, 0.0), np.where(crosses, network, 0.0))
    learned = np.where(crosses, 1.0, reduction_factor(efficiency.reductions, num_bytes, size))
    return np.where(np.greater(size, 1), (moving + steps_s) * learned, 0.0)


def reduce_scatter_s(
    num_bytes: ScalarOrArray,
    topology: GroupTopology,
    efficiency: HardwareEfficiency,
    messages: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Seconds until each rank has its part of the sum of `num_bytes`, in so many messages; arguments broadcast."""
    round_s = _round_s(num_bytes, topology, efficiency, messages=messages)
    return np.where(np.greater(topology.size, 1), round_s + messages * efficiency.collective_s, 0.0)


all_gather_s = reduce_scatter_s
"""Seconds until each rank has the parts of all ranks: the same rounds in the other direction."""


def all_reduce_s(
    num_bytes: ScalarOrArray,
    topology: GroupTopology,
    efficiency: HardwareEfficiency,
    messages: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Seconds until each rank has the sum of `num_bytes`; in so many messages; arguments broadcast."""
    size = np.maximum(topology.size, 1)
    round_s = _round_s(num_bytes, topology, efficiency, carried_by_network(size, topology.num_nodes), messages)
    return np.where(np.greater(topology.size, 1), 2 * round_s + messages * efficiency.collective_s, 0.0)


def all_to_all_s(num_bytes: ScalarOrArray, topology: GroupTopology, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds until each rank has a part of the numbers of every other; arguments broadcast.

    Of the n parts of its bytes a rank keeps one, sends those for its own node over the link inside, and the others over
    the network cards, which carry messages of all its ranks. All are posted at once, so their latencies do not add up.
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


def dispatch_s(
    num_bytes: ScalarOrArray, chosen: int, topology: GroupTopology, efficiency: HardwareEfficiency
) -> ScalarOrArray:
    """Seconds of an exchange that sends each token once to a node and once to a rank; arguments broadcast.

    Of n nodes, or ranks, a share 1 - (1 - 1/n)^chosen has an expert of a token, where experts are chosen evenly.

    Args:
        num_bytes: bytes of the tokens of one rank, once for each expert that they choose.
    """
    size, nodes = np.maximum(topology.size, 1), topology.num_nodes
    tokens, in_a_node = num_bytes / chosen, size / nodes
    on_nodes, on_ranks = (1 - (1 - 1 / each) ** chosen for each in (nodes, size))
    leaving = in_a_node * tokens * (nodes - 1) * on_nodes
    network = leaving / (topology.network_bandwidth * efficiency.network_efficiency) + topology.network_latency_s
    inside = tokens * (size - nodes) * on_ranks / (topology.inside_bandwidth * efficiency.inside_efficiency)
    moving = np.maximum(inside + topology.inside_latency_s, np.where(np.greater(nodes, 1), network, 0.0))
    return np.where(np.greater(size, 1), moving + efficiency.collective_s, 0.0)


def transfer_bandwidth(links: BoundaryLinks, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Bytes per second that a message between stages reaches [...], as many as there are links."""
    return links.bandwidth * np.where(
        links.crosses_nodes, efficiency.transfer_network_efficiency, efficiency.transfer_inside_efficiency
    )


def transfer_s(num_bytes: ScalarOrArray, links: BoundaryLinks, efficiency: HardwareEfficiency) -> ScalarOrArray:
    """Seconds of one message between stages; arguments broadcast."""
    return num_bytes / transfer_bandwidth(links, efficiency) + links.latency_s + efficiency.transfer_s


def sending_s(
    num_bytes: Floats, links: BoundaryLinks, topology: GroupTopology, efficiency: HardwareEfficiency, *, in_parts: bool
) -> Floats:
    """Return seconds until all tensor-parallel ranks of the next stage have their messages; arguments broadcast."""
    if not in_parts:
        return np.asarray(transfer_s(num_bytes, links, efficiency), dtype=float)
    part = transfer_s(num_bytes / topology.size, links, efficiency)
    return np.asarray(part + all_gather_s(num_bytes, topology, efficiency), dtype=float)
