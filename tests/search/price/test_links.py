"""Links that groups cross and share, and seconds of collectives."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster, Link
from megatron_terapipe.search.price.efficiency import (
    BYTES,
    RANKS,
    HardwareEfficiency,
    reduction_factor,
)
from megatron_terapipe.search.price.links import (
    BoundaryLinks,
    ClusterTable,
    GroupTopology,
    RankGroups,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    transfer_s,
)
from megatron_terapipe.search.rank.space import divisors
from tests.search.price.machines import A100, NODE, nodes


def groups(count: int, dp: int, tp: int, pp: int, **changes: object) -> RankGroups:
    layout = ParallelLayout(data_parallel_size=dp, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return RankGroups(ClusterTable.of(nodes(count, **changes)), layout)


def test_ranks_that_divide_states() -> None:
    # 2 nodes of 8: 16 ranks with the same weights; the 8 of a node divide states, and 8 pairs share 4 cards.
    every, (group, copies) = groups(2, dp=16, tp=1, pp=1).shards(None), groups(2, dp=16, tp=1, pp=1).shards(8)
    assert (every.group.size, every.copies.size) == (16, 1)
    assert (group.size, group.num_nodes.tolist(), copies.size, copies.num_nodes.tolist()) == (8, [1], 2, [2])
    assert copies.network_bandwidth.tolist() == [25e9 / 2]


def test_stages_in_one_node_and_across() -> None:
    # 2 nodes of 8, 4 ranks a stage: stages 0 and 1 are in the first node, 2 and 3 in the second.
    pipe = groups(2, dp=2, tp=2, pp=4).pipe
    assert pipe.crosses_nodes.tolist() == [False, True, False, True]
    assert pipe.bandwidth.tolist() == [300e9, 25e9, 300e9, 25e9]
    # With 8 ranks a stage, 8 pairs share 4 cards.
    assert groups(2, dp=4, tp=2, pp=2).pipe.bandwidth.tolist() == [12.5e9, 12.5e9]


def test_the_order_of_equal_nodes_is_irrelevant_and_a_placement_counts() -> None:
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=2)
    usual = RankGroups(ClusterTable.of(nodes(2)), layout)
    swapped = RankGroups(ClusterTable.of(nodes(2)), layout, (*range(8, 16), *range(8)))
    assert usual.pipe.bandwidth.tolist() == swapped.pipe.bandwidth.tolist()
    # Dealing ranks in turn to both nodes puts every tensor group across the network.
    turns = RankGroups(ClusterTable.of(nodes(2)), layout, tuple(rank // 2 + 8 * (rank % 2) for rank in range(16)))
    assert turns.tensor.num_nodes.tolist() == [2, 2]
    assert usual.tensor.num_nodes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("count", "placement", "line"),
    [
        *((2, each, "does not name 16 different devices") for each in ((0,) * 16, (*range(15), 99), tuple(range(15)))),
        (1, None, "is 16, and the cluster has 8 devices"),
    ],
)
def test_refused_layouts(count: int, placement: tuple[int, ...] | None, line: str) -> None:
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=8)
    with pytest.raises(ConfigError, match=line):
        RankGroups(ClusterTable.of(nodes(count)), layout, placement)


@st.composite
def placed_ranks(draw: st.DrawFn) -> tuple[Cluster, ParallelLayout, tuple[int, ...] | None]:
    """Unlike nodes, ranks that use all devices or some, in the order of the hostfile or another."""
    each = st.builds(
        lambda devices, cards, inside, network: replace(
            NODE,
            num_devices=devices,
            num_network_cards=cards,
            inside=Link(bandwidth=inside * 1e9, latency_s=1e-6 * inside),
            network=Link(bandwidth=network * 1e9, latency_s=1e-6 * network),
        ),
        st.integers(1, 6),
        st.integers(1, 4),
        st.sampled_from([50, 300]),
        st.sampled_from([3, 25]),
    )
    cluster = Cluster(nodes=tuple(draw(st.lists(each, min_size=1, max_size=6))))
    tensor = draw(st.integers(1, cluster.num_devices))
    pipeline = draw(st.integers(1, cluster.num_devices // tensor))
    sequence = draw(st.integers(1, cluster.num_devices // (tensor * pipeline)))
    data = cluster.num_devices // (tensor * pipeline * sequence)
    layout = ParallelLayout(
        data_parallel_size=data,
        sequence_parallel_size=sequence,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        expert_parallel_size=draw(st.sampled_from(divisors(data * sequence * tensor))),
    )
    devices = draw(st.permutations(range(cluster.num_devices)))
    return cluster, layout, draw(st.sampled_from([None, tuple(devices[: layout.world_size])]))


@settings(max_examples=60, deadline=None)
@given(case=placed_ranks())
def test_links_of_groups_are_those_of_each_group(
    case: tuple[Cluster, ParallelLayout, tuple[int, ...] | None],
) -> None:
    """Links of all groups at once are the slowest of those that each group, looked at by itself, has."""
    cluster, layout, placement = case
    found = RankGroups(ClusterTable.of(cluster), layout, placement)
    node_of_rank = found.nodes.reshape(-1)

    def by_stage(groups: list[list[int]]) -> list[list[Counter[int]]]:
        """Nodes of the members of each group, stage by stage."""
        of_stages: list[list[Counter[int]]] = [[] for _ in range(layout.pipeline_parallel_size)]
        for group in groups:
            of_stages[layout.coordinate(group[0]).pipe].append(Counter(node_of_rank[group].tolist()))
        return of_stages

    copies: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, place in enumerate(layout.coordinates()):
        copies[place.pipe, place.tensor].append(rank)
    for links, groups in (
        (found.tensor, layout.groups("tensor")),
        (found.sequence, layout.groups("sequence")),
        (found.data, list(copies.values())),
        (found.expert, layout.groups("expert")),
        (found.expert_copies, layout.groups("expert_copies")),
    ):
        stages = by_stage(groups)
        leaving = Counter(node for stage in stages for group in stage if len(group) > 1 for node in group)
        for stage, groups_of_stage in enumerate(stages):
            parts = [(cluster.nodes[node], node, count) for group in groups_of_stage for node, count in group.items()]
            shares = [
                node.network.bandwidth * min(node.num_network_cards / max(leaving[index], 1), count)
                for node, index, count in parts
            ]
            assert links.at(stage) == (
                len(groups[0]),
                max(map(len, groups_of_stage)),
                min(node.inside.bandwidth for node, _, _ in parts),
                max(node.inside.latency_s for node, _, _ in parts),
                min(shares),
                max(node.network.latency_s for node, _, _ in parts),
            )


def test_replicas_of_a_uniform_cluster_are_alike() -> None:
    for layout in ({"dp": 2, "tp": 2, "pp": 4}, {"dp": 3, "tp": 1, "pp": 5}):
        all_of_them = groups(2, **layout)
        assert all_of_them.by_replica == (all_of_them,)


def test_replicas_on_unlike_nodes_have_devices_and_links_of_their_own() -> None:
    # Two stages of two replicas of four ranks: the first replica on nodes 0 and 2, the second on 1 and 3.
    slow = replace(
        NODE,
        device=replace(A100, name="slow"),
        inside=Link(bandwidth=10e9, latency_s=9e-6),
        network=Link(bandwidth=1e9, latency_s=1e-3),
    )
    four = [replace(node, num_devices=4) for node in (NODE, slow, slow, slow)]
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=2)
    both = RankGroups(ClusterTable.of(Cluster(nodes=tuple(four))), layout)
    first, second = both.by_replica
    assert (first.replicas, second.replicas) == ((0,), (1,))
    assert [[device.name for device in devices] for devices in first.devices] == [["A100"], ["slow"]]
    assert [[device.name for device in devices] for devices in second.devices] == [["slow"], ["slow"]]
    assert first.tensor.inside_bandwidth.tolist() == [300e9, 10e9]
    assert both.tensor.inside_bandwidth.tolist() == second.tensor.inside_bandwidth.tolist() == [10e9, 10e9]
    assert first.pipe.bandwidth.tolist() == both.pipe.bandwidth.tolist() == [1e9, 1e9]
    # Gradients are reduced between all of them.
    for each in (first, second):
        assert each.data.network_bandwidth.tolist() == both.data.network_bandwidth.tolist()


def test_replicas_that_do_not_count_still_use_the_links() -> None:
    # Both replicas of a stage share one card of a node; the second one's next stage is in the same node.
    node, other = replace(NODE, num_devices=2, num_network_cards=1), replace(NODE, device=replace(A100, name="slow"))
    cluster = Cluster(nodes=(node, node, replace(other, num_devices=2, num_network_cards=1)))
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=1, pipeline_parallel_size=3)
    unlike = RankGroups(ClusterTable.of(cluster), layout, (0, 1, 2, 4, 3, 5))
    assert len(unlike.by_replica) == 2
    for each in unlike.by_replica:
        assert each.pipe.bandwidth[0] == 12.5e9


PERFECT = HardwareEfficiency(
    inside_efficiency=1.0,
    network_efficiency=1.0,
    transfer_network_efficiency=1.0,
    transfer_inside_efficiency=0.5,
    collective_s=0.0,
    collective_fill_s=0.0,
    transfer_s=0.0,
)
INSIDE = GroupTopology(8, 1, 300e9, 0.0, 1.0, 0.0)


ALONE, THREE_NODES = INSIDE._replace(size=1), GroupTopology(24, 3, 300e9, 0.0, 100e9, 0.0)
PAIR, FOUR_A_NODE = GroupTopology(16, 2, 300e9, 0.0, 100e9, 0.0), GroupTopology(8, 2, 300e9, 0.0, 100e9, 0.0)


@pytest.mark.parametrize(
    ("collective", "num_bytes", "topology", "seconds"),
    [
        # A ring sends two rounds of its share.
        (all_reduce_s, 3e9, INSIDE, 2 * 7 / 8 * 3e9 / 300e9),
        (reduce_scatter_s, 3e9, INSIDE, 7 / 8 * 3e9 / 300e9),
        (all_gather_s, 3e9, INSIDE, 7 / 8 * 3e9 / 300e9),
        # One rank sends no message.
        (all_reduce_s, 3e9, ALONE, 0),
        (reduce_scatter_s, 3e9, ALONE, 0),
        # A ring over nodes is as fast as its slowest link.
        (all_reduce_s, 1e9, THREE_NODES, 2 * 23 / 24 * 1e9 / 100e9),
        # One rank a node: no message is inside a node, however slow its links are.
        (all_reduce_s, 1e9, GroupTopology(2, 2, 1.0, 0.0, 100e9, 0.0), 2 * 1 / 2 * 1e9 / 100e9),
        # Two nodes exchange their sums; gathering has no sums that could be sent in place of their terms.
        (all_reduce_s, 1e9, PAIR, 1e9 / 100e9),
        (all_gather_s, 1e9, PAIR, 15 / 16 * 1e9 / 100e9),
        # The sums inside nodes take time, too.
        (all_reduce_s, 1e9, PAIR._replace(inside_bandwidth=10e9), 2 * 15 / 16 * 1e9 / 10e9),
        # Small messages wait for latencies: trees over nodes, rings of all ranks.
        (all_reduce_s, 0.0, GroupTopology(16, 2, 300e9, 1e-6, 100e9, 10e-6), 2 * (7e-6 + 10e-6)),
        (all_reduce_s, 0.0, GroupTopology(64, 8, 300e9, 1e-6, 100e9, 10e-6), 2 * (7e-6 + 3 * 10e-6)),
        (all_gather_s, 0.0, GroupTopology(64, 8, 300e9, 1e-6, 100e9, 10e-6), 56e-6 + 7 * 10e-6),
        # A rank sends a part to each other one.
        (all_to_all_s, 3e9, INSIDE, 7 / 8 * 3e9 / 300e9),
        (all_to_all_s, 3e9, ALONE, 0),
        # Over two nodes of four it sends 3 parts of 8 inside, and 4 over the cards, which carry those of four ranks.
        (all_to_all_s, 8e9, FOUR_A_NODE, 4 * 4e9 / 100e9),
        (all_to_all_s, 8e9, FOUR_A_NODE._replace(inside_bandwidth=10e9), 3e9 / 10e9),
        # All messages are posted at once.
        (all_to_all_s, 0.0, FOUR_A_NODE._replace(inside_latency_s=1e-6, network_latency_s=1e-3), 1e-3),
    ],
)
def test_seconds_of_collectives(
    collective: Callable[..., object], num_bytes: float, topology: GroupTopology, seconds: float
) -> None:
    assert collective(num_bytes, topology, PERFECT) == pytest.approx(seconds)


def test_each_message_waits_for_latencies_and_fills_its_chunks() -> None:
    filling = replace(PERFECT, collective_fill_s=1e-3)
    assert all_gather_s(8 * 2**20, INSIDE._replace(inside_bandwidth=1e18), filling) == pytest.approx(0.5e-3)
    ring = GroupTopology(64, 8, 1e18, 1e-6, 1e18, 10e-6)
    one, ten = (float(all_gather_s(1.0, ring, PERFECT, messages)) for messages in (1, 10))
    assert ten == pytest.approx(10 * one)


def test_learned_factors_are_of_reductions_inside_a_node() -> None:
    learned = replace(PERFECT, reductions=tuple(float(index) for index in range(2, 2 + len(PERFECT.reductions))))
    inside, across = GroupTopology(2, 1, 300e9, 0.0, 1.0, 0.0), THREE_NODES
    assert all_reduce_s(2**20, inside, learned) == pytest.approx(2 * all_reduce_s(2**20, inside, PERFECT))
    assert all_reduce_s(2**20, across, learned) == pytest.approx(all_reduce_s(2**20, across, PERFECT))


def test_a_message_inside_a_node_reaches_less_of_its_link() -> None:
    links = BoundaryLinks(10e9, 1e-3, np.array([False, True]))
    assert transfer_s(1e9, links, PERFECT).tolist() == pytest.approx([0.201, 0.101])


NOTHING = HardwareEfficiency().reductions


def learned(ranks: int, num_bytes: int, factor: float) -> tuple[float, ...]:
    factors = list(NOTHING)
    factors[RANKS.index(ranks) * len(BYTES) + BYTES.index(num_bytes)] = factor
    return tuple(factors)


@pytest.mark.parametrize(
    ("factors", "num_bytes", "num_ranks", "expected"),
    [
        # Before any trial.
        (NOTHING, 5e6, 3, 1.0),
        # It holds where it was learned, and fades to the next; half way in the logarithm of bytes, and of ranks.
        (learned(4, 2**22, 2.0), 2**22, 4, 2.0),
        (learned(4, 2**22, 2.0), 2**23, 4, 1.0),
        (learned(4, 2**22, 2.0), 2**22, np.array([2, 8]), 1.0),
        (learned(4, 2**22, 2.0), 2**22.5, 4, 2**0.5),
        (learned(4, 2**22, 2.0), 2**22, 2**1.5, 2**0.5),
        # Beyond the outermost it stays the same.
        (learned(8, BYTES[-1], 1.5), np.array([BYTES[-1], 1e10]), 64, 1.5),
        (learned(2, BYTES[0], 0.5), 0.0, 2, 0.5),
    ],
)
def test_factors_of_reductions(factors: tuple[float, ...], num_bytes: Any, num_ranks: Any, expected: float) -> None:
    assert reduction_factor(factors, num_bytes, num_ranks) == pytest.approx(expected)
