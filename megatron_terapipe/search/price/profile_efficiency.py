"""Constants from a profile, and factors between training and the profile.

Links, optimizer and engine become fields of `HardwareEfficiency` and latencies of a cluster; the factors are the same
for every strategy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.machine.library import names_one_device
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.price.efficiency import (
    HardwareEfficiency,
    carried_by_network,
    constant,
    reachable_bandwidth,
)
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes, OpTimes
from megatron_terapipe.search.price.profile import Profile, ProfiledLink, lone_sizes
from megatron_terapipe.search.price.workload import Layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFactors:
    """Seconds in training per second of the profile.

    The priors are guesses: that of `ops` is wide enough for two ranks that share what one had alone, that of `messages`
    for collectives that wait for a busy processor.
    """

    ops: float = constant(1.0, 0.4)
    """Of what layers compute."""
    messages: float = constant(1.0, 0.8)
    """Of collectives and of messages between stages, beyond the latency of their links."""
    gaps: float = constant(1.0, 0.7)
    """Of what the executor needs between two ops of a rank."""
    step: float = constant(1.0, 0.5)
    """Of what comes once an iteration: the optimizer, and what an iteration takes however small it is."""

    def efficiency(self, measured: HardwareEfficiency) -> HardwareEfficiency:
        """HardwareEfficiency of training."""
        return replace(
            measured,
            inside_efficiency=measured.inside_efficiency / self.messages,
            network_efficiency=measured.network_efficiency / self.messages,
            transfer_inside_efficiency=measured.transfer_inside_efficiency / self.messages,
            transfer_network_efficiency=measured.transfer_network_efficiency / self.messages,
            collective_s=measured.collective_s * self.messages,
            transfer_s=measured.transfer_s * self.messages,
            op_s=measured.op_s * self.gaps,
            optimizer_passes=measured.optimizer_passes * self.step,
            iteration_s=measured.iteration_s * self.step,
        )


@dataclass(frozen=True)
class ScaledTimes:
    """Op times of which every one takes longer by the same factor; an `OpTimes`."""

    op_times: OpTimes
    factor: float

    @property
    def includes_collectives(self) -> bool:
        """As the measured ones say."""
        return self.op_times.includes_collectives

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        return LayerTimes(*(np.multiply(part, self.factor) for part in self.op_times(query)))


class RememberedTimes:
    """Op times that are looked up once, where the same few are asked for again and again; an `OpTimes`."""

    def __init__(self, op_times: OpTimes) -> None:
        self._op_times = op_times
        # Layers are kept with their times: while one is, no other has its id.
        self._known: dict[tuple[object, ...], tuple[Layer, LayerTimes]] = {}

    @property
    def includes_collectives(self) -> bool:
        """As the others say."""
        return self._op_times.includes_collectives

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        sizes = query.tensor_parallel_size, query.micro_batch_size, query.start, query.end, query.sequence_parallel_size
        grids = [np.asarray(each, dtype=float) for each in sizes]
        key = (
            id(query.layer),
            query.device,
            query.recompute,
            query.sequence_parallel,
            query.key_value_gradients,
            *((each.shape, each.tobytes()) for each in grids),
        )
        if key not in self._known:
            self._known[key] = query.layer, self._op_times(query)
        return self._known[key][1]


ENGINE_ZERO_STAGE = 1
"""ZeRO stage that engines are measured under (`search.measure.engine`)."""

LEAST_S = 1e-7
"""No message starts in less."""


class Line(NamedTuple):
    """Seconds of a message: `start_s + num_bytes * byte_s`."""

    start_s: float
    byte_s: float


def measured_efficiency(
    profile: Profile, cluster: Cluster, efficiency: HardwareEfficiency | None = None, software: Software = TERAPIPE
) -> HardwareEfficiency:
    """Return efficiency in which what a profile has measured is as measured; the rest stays.

    Several measurements of a kind of link count alike: one group alone, and several that share the cards of a node.

    Args:
        cluster: of whose nodes some are such machines; of several kinds of nodes the first that has measured devices.
    """
    efficiency = efficiency or HardwareEfficiency()
    node = measured_node(profile, measured_cluster(profile, cluster))
    values: dict[str, float] = {}
    for where in ("inside", "network"):
        reached = [
            (link, _share_reached(link, node)) for link in _of(profile, where) if not _is_bound_inside(link, profile)
        ]
        transfers = [share for link, share in reached if link.what == "transfer"]
        sums = [share for link, share in reached if link.what == "all_reduce"]
        values |= {f"transfer_{where}_efficiency": geometric_mean(transfers)} if transfers else {}
        values |= {f"{where}_efficiency": geometric_mean(sums)} if sums else {}
    starts = _transfer_start(profile, node)
    values |= {} if starts is None else {"transfer_s": starts}
    starts = _collective_start(profile, node)
    values |= {} if starts is None else {"collective_s": starts}
    if profile.engine is not None:
        reached_bytes = reachable_bandwidth(node.device) * efficiency.memory_efficiency
        moved = profile.engine.optimizer_s_per_parameter * reached_bytes
        beside = software.state(profile.precision, ENGINE_ZERO_STAGE).whole_step_bytes
        values["optimizer_passes"] = max((moved - beside) / software.step_bytes, LEAST_S)
        values["iteration_s"] = max(profile.engine.iteration_s, LEAST_S)
        values["op_s"] = profile.engine.op_s
    known = {each.name for each in fields(HardwareEfficiency)}
    found: HardwareEfficiency = replace(efficiency, **{name: value for name, value in values.items() if name in known})  # type: ignore[arg-type]
    return found


def measured_cluster(profile: Profile, cluster: Cluster) -> Cluster:
    """Return the cluster with the latency of the network that a profile has measured; the rest stays.

    Nodes whose network is another than the measured node's keep their own: nobody measured it.
    """
    first = measured_node(profile, cluster)
    alone = [link for link in _of(profile, "network") if link.what == "transfer" and link.flows == 1]
    if not alone:
        return cluster
    start = _transfer_start(profile, first)
    # Without a measurement inside a node, nothing tells the start of a message from the latency.
    latency = max(message_line(alone[0].points).start_s - (start or HardwareEfficiency().transfer_s), LEAST_S)
    network = replace(first.network, latency_s=latency)
    nodes = (replace(node, network=network) if node.network == first.network else node for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def measured_node(profile: Profile, cluster: Cluster) -> Node:
    """Return the first node with devices of the kind that a profile was measured on; the first of all if none has."""
    return next((node for node in cluster.nodes if _has_measured_devices(node, profile)), cluster.nodes[0])


def share_of(link: ProfiledLink, node: Node) -> float:
    """Return the bytes per second that one of the groups gets by the data sheet of a node, others sharing its cards.

    As `cost.links.rank_groups` says: groups share the cards in equal parts, and no rank drives more than one card.
    """
    if link.where == "inside":
        return node.inside.bandwidth
    return node.network.bandwidth * min(node.num_network_cards / link.flows, link.ranks_per_node)


def profile_notes(profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Yield a line for each kind of link that ranks of a cluster use, and of sizes, that a profile has not measured."""
    name = profile.source or "the profile"
    others = dict.fromkeys(node.device.name for node in cluster.nodes if not _has_measured_devices(node, profile))
    if others:
        yield (
            f"{name} was measured on {profile.device}: ops on {' and '.join(others)} are priced as if they took as long"
        )
    if len(cluster.nodes) > 1 and not list(_of(profile, "network")):
        yield (
            f"{name} was measured on one host: links between hosts are those of the data sheet; measure --hostfile "
            "measures them"
        )
    largest = max(node.num_devices for node in cluster.nodes)
    if largest > 1 and not list(_of(profile, "inside")):
        yield f"{name} was measured with one rank on a host: links inside a node are those of the data sheet"
    elif largest > profile.num_devices:
        yield (
            f"{name} was measured with {profile.num_devices} ranks on a host, and nodes have up to {largest}: what "
            f"{largest} ranks share of a node was not measured"
        )
    for sizes in lone_sizes(profile):
        yield (
            f"{name} was measured with {sizes} alone: op times of others are a guess; measure more sizes, or with a "
            "longer --budget-s"
        )


def message_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit start and time per byte to messages, relative errors small, neither below zero."""
    from scipy.optimize import nnls

    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    features = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), 1e-30)
    (start, byte), _ = nnls(features / scale, np.ones(len(sizes)))
    return Line(max(float(start / scale[0]), LEAST_S), max(float(byte / scale[1]), 1e-15))


def _has_measured_devices(node: Node, profile: Profile) -> bool:
    """Whether a profile was measured on devices of the kind of a node's: processors are all one kind."""
    if profile.accelerator == "cpu" or not node.device.is_gpu:
        return (profile.accelerator == "cpu") is not node.device.is_gpu
    return names_one_device(node.device.name, profile.device)


def _share_reached(link: ProfiledLink, node: Node) -> float:
    """Share of the data sheet that a group reached."""
    rounds = 1.0
    if link.what == "all_reduce":
        num_nodes = 1 if link.where == "inside" else link.num_ranks // link.ranks_per_node
        rounds = 2 * float(carried_by_network(link.num_ranks, num_nodes))
    return rounds / (message_line(link.points).byte_s * share_of(link, node))


def _is_bound_inside(link: ProfiledLink, profile: Profile) -> bool:
    """Whether an all-reduce over nodes took no longer than one inside them, and so says nothing of the network."""
    if link.where == "inside" or link.what == "transfer" or link.ranks_per_node == 1:
        return False
    inside = [message_line(each.points).byte_s for each in _of(profile, "inside") if each.what == link.what]
    return bool(inside) and message_line(link.points).byte_s <= 1.1 * max(inside)


def _of(profile: Profile, where: str) -> list[ProfiledLink]:
    return [link for link in profile.links if link.where == where]


def _transfer_start(profile: Profile, node: Node) -> float | None:
    """Seconds that a message between stages takes to start, beside the latency of its link; None if unknown."""
    lines = [message_line(link.points) for link in _of(profile, "inside") if link.what == "transfer"]
    return max(lines[0].start_s - node.inside.latency_s, LEAST_S) if lines else None


def _collective_start(profile: Profile, node: Node) -> float | None:
    """Seconds that a collective takes to start, beside the latencies of its links; None if none was measured."""
    sums = [link for link in profile.links if link.what == "all_reduce"]
    # One inside a node tells most: there latency is small.
    for link in sorted(sums, key=lambda each: (each.where, each.flows, each.ranks_per_node)):
        nodes = 1 if link.where == "inside" else max(link.num_ranks // link.ranks_per_node, 1)
        inside_steps = (link.num_ranks if nodes == 1 else link.ranks_per_node) - 1
        latency = inside_steps * node.inside.latency_s + np.log2(nodes) * node.network.latency_s
        return max(message_line(link.points).start_s - 2 * float(latency), LEAST_S)
    return None
