"""Which links groups cross, and who shares them."""

from dataclasses import replace

import pytest

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.rank_groups import RankGroups
from megatron_terapipe.search.inputs.cluster import Cluster, Link
from tests.search.cost.machines import A100, NODE, nodes


def groups(count: int, dp: int, tp: int, pp: int, **changes: object) -> RankGroups:
    layout = ParallelLayout(data_parallel_size=dp, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return RankGroups(nodes(count, **changes), layout)


def test_a_tensor_group_inside_a_node_crosses_no_network() -> None:
    tensor = groups(4, dp=2, tp=8, pp=2).tensor
    assert tensor.num_nodes.tolist() == [1, 1]
    assert tensor.inside_bandwidth.tolist() == [300e9, 300e9]


def test_data_groups_of_a_node_share_its_cards() -> None:
    # Eight groups leave each node with one rank each: four cards between them, half a card for each.
    data = groups(4, dp=4, tp=8, pp=1).data
    assert data.num_nodes.tolist() == [4]
    assert data.network_bandwidth.tolist() == [25e9 * 4 / 8]


def test_a_group_with_a_whole_node_has_all_its_cards() -> None:
    data = groups(4, dp=32, tp=1, pp=1).data
    assert (data.num_nodes.tolist(), data.network_bandwidth.tolist()) == ([4], [4 * 25e9])


def test_a_rank_alone_in_its_node_drives_one_card() -> None:
    data = groups(2, dp=2, tp=8, pp=1, num_network_cards=16).data
    assert data.network_bandwidth.tolist() == [25e9]


def test_a_tensor_group_over_two_nodes() -> None:
    tensor = groups(2, dp=1, tp=16, pp=1).tensor
    assert (tensor.num_nodes.tolist(), tensor.network_bandwidth.tolist()) == ([2], [4 * 25e9])


def test_stages_in_one_node_and_across() -> None:
    # 2 nodes of 8, 4 ranks a stage: stages 0 and 1 are in the first node, 2 and 3 in the second.
    pipe = groups(2, dp=2, tp=2, pp=4).pipe
    assert pipe.crosses_nodes.tolist() == [False, True, False, True]
    assert pipe.bandwidth.tolist() == [300e9, 25e9, 300e9, 25e9]
    # With 8 ranks a stage, 8 pairs share 4 cards.
    assert groups(2, dp=4, tp=2, pp=2).pipe.bandwidth.tolist() == [12.5e9, 12.5e9]


def test_the_slowest_node_counts() -> None:
    slow = replace(NODE, network=Link(bandwidth=1e9, latency_s=1e-3), device=replace(A100, name="slow"))
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=8)
    mixed = RankGroups(Cluster(nodes=(NODE, slow)), layout)
    assert mixed.data.network_bandwidth.tolist() == [1e9 * 4 / 8]
    assert mixed.data.network_latency_s.tolist() == [1e-3]
    assert [device.name for device in mixed.devices[0]] == ["A100", "slow"]


def test_the_order_of_equal_nodes_is_irrelevant_and_a_placement_counts() -> None:
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=2)
    usual = RankGroups(nodes(2), layout)
    swapped = RankGroups(nodes(2), layout, (*range(8, 16), *range(8)))
    assert usual.pipe.bandwidth.tolist() == swapped.pipe.bandwidth.tolist()
    # Dealing ranks in turn to both nodes puts every tensor group across the network.
    turns = RankGroups(nodes(2), layout, tuple(rank // 2 + 8 * (rank % 2) for rank in range(16)))
    assert turns.tensor.num_nodes.tolist() == [2, 2]
    assert usual.tensor.num_nodes.tolist() == [1, 1]


@pytest.mark.parametrize("placement", [(0,) * 16, (*range(15), 99), tuple(range(15))])
def test_a_placement_names_every_rank_once(placement: tuple[int, ...]) -> None:
    layout = ParallelLayout(data_parallel_size=2, tensor_parallel_size=8)
    with pytest.raises(ConfigError, match="placement does not name 16 different devices"):
        RankGroups(nodes(2), layout, placement)


def test_a_cluster_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match=r"is 16, and the cluster has 8 devices"):
        groups(1, dp=2, tp=8, pp=1)
