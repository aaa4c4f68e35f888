"""Measured links and engines as constants of the cost model."""

from dataclasses import replace

import pytest

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.links import (
    BoundaryLinks,
    ClusterTable,
    GroupTopology,
    RankGroups,
    ShardLinks,
    all_reduce_s,
    transfer_s,
)
from megatron_terapipe.search.price.profile import Profile, ProfiledLink
from megatron_terapipe.search.price.profile_times import (
    measured_cluster,
    measured_efficiency,
    measured_node,
    message_line,
    profile_notes,
)
from megatron_terapipe.search.price.step import step_costs
from tests.search.price.profiles import profile

LINK = Link(bandwidth=5e9, latency_s=2e-5)
CLUSTER = Cluster(
    nodes=(Node(name="here", device=device("cpu-core"), num_devices=2, inside=LINK, network=LINK, num_network_cards=1),)
)
SPAN = GroupTopology(2, 1, LINK.bandwidth, LINK.latency_s, LINK.bandwidth, LINK.latency_s)


def test_a_line_through_messages() -> None:
    line = message_line([(size, 3e-5 + size / 2e9) for size in (2**10, 2**16, 2**24)])
    assert line == pytest.approx((3e-5, 1 / 2e9), rel=1e-6)


def test_messages_are_then_priced_as_measured() -> None:
    efficiency = measured_efficiency(profile(), CLUSTER)
    for num_bytes in (2**10, 2**22):
        measured = 2e-4 + num_bytes / 1e9
        assert all_reduce_s(num_bytes, SPAN, efficiency) == pytest.approx(measured, rel=1e-6)
        links = BoundaryLinks(LINK.bandwidth, LINK.latency_s, False)
        assert transfer_s(num_bytes, links, efficiency) == pytest.approx(measured, rel=1e-6)


def test_the_optimizer_is_then_priced_as_measured() -> None:
    efficiency = measured_efficiency(profile(), CLUSTER)
    bandwidth = CLUSTER.nodes[0].device.memory_bandwidth
    # Engines are measured on one rank, under ZeRO 1.
    alone = ShardLinks(SPAN._replace(size=1))
    step = step_costs(
        1e6,
        0,
        alone,
        SPAN,
        bandwidth,
        zero_stage=1,
        precision="fp32",
        software=TERAPIPE,
        efficiency=efficiency,
    )
    assert step.optimizer == pytest.approx(1e6 * 1e-9, rel=1e-6)
    assert efficiency.iteration_s == 1e-3


NETWORK_BYTE_S, NETWORK_LATENCY_S = 1 / 1.25e8, 1e-3
SIZES = (2**10, 2**14, 2**18, 2**22)


def on_hosts(cards: int) -> tuple[Profile, Cluster]:
    """Two hosts of two ranks and slow cards, as measured; and four such hosts by their data sheets, which are wrong."""
    inside = {link.what: link for link in profile().links}
    start = dict(inside["all_reduce"].points)[2**10] - 2**10 / 1e9

    def link(what: str, rounds: float, steps: float, flows: int = 1) -> ProfiledLink:
        byte_s = rounds * NETWORK_BYTE_S * max(flows / cards, 1)
        points = tuple((size, start - steps * 2e-5 + steps * NETWORK_LATENCY_S + size * byte_s) for size in SIZES)
        return ProfiledLink(where="network", what=what, num_ranks=2, points=points, flows=flows)

    network = [link("all_reduce", 1, 0), link("transfer", 1, 1), link("all_reduce", 1, 0, 2), link("transfer", 1, 1, 2)]
    measured = profile().model_copy(update={"num_nodes": 2, "links": (*profile().links, *network)})
    card = Link(bandwidth=1.25e9, latency_s=5e-6)
    node = replace(CLUSTER.nodes[0], network=card, num_network_cards=cards)
    return measured, Cluster(nodes=tuple(replace(node, name=f"host-{index}") for index in range(4)))


@pytest.mark.parametrize("cards", [1, 2])
def test_messages_between_hosts_are_priced_as_measured_on_more_of_them(cards: int) -> None:
    measured, sheet = on_hosts(cards)
    cluster, efficiency = measured_cluster(measured, sheet), measured_efficiency(measured, sheet)
    assert [node.network.latency_s for node in cluster.nodes] == pytest.approx([NETWORK_LATENCY_S] * 4, rel=1e-6)
    groups = RankGroups(ClusterTable.of(cluster), ParallelLayout(data_parallel_size=2, pipeline_parallel_size=4))
    num_bytes = 2**20
    # Two pairs of neighbours send at once, and share the cards.
    alone_s = 2e-4 - 2e-5 + NETWORK_LATENCY_S
    assert transfer_s(num_bytes, groups.pipe.at(0), efficiency) == pytest.approx(
        alone_s + num_bytes * NETWORK_BYTE_S * 2 / cards, rel=1e-6
    )
    groups = RankGroups(ClusterTable.of(cluster), ParallelLayout(data_parallel_size=4, tensor_parallel_size=2))
    rounds = 2 * (4 - 1) / 4
    found = all_reduce_s(num_bytes, groups.data.at(0), efficiency) - all_reduce_s(0, groups.data.at(0), efficiency)
    assert found == pytest.approx(rounds * num_bytes * NETWORK_BYTE_S * 2 / cards, rel=1e-6)


def test_a_mixed_cluster_is_priced_by_its_measured_machine_in_any_order() -> None:
    measured, sheet = on_hosts(1)
    other = replace(
        sheet.nodes[0],
        device=device("A100-80GB"),
        inside=Link(bandwidth=3e11, latency_s=1e-6),
        network=Link(bandwidth=2.5e10, latency_s=3e-6),
    )
    mixed = Cluster(nodes=(other, *sheet.nodes))
    assert measured_efficiency(measured, mixed) == measured_efficiency(measured, sheet)
    found = measured_cluster(measured, mixed)
    assert found.nodes[0] == other
    assert found.nodes[1:] == measured_cluster(measured, sheet).nodes
    (note,) = profile_notes(measured, mixed)
    assert note == ("the profile was measured on a processor: ops on A100-SXM4-80GB are priced as if they took as long")
    # The same accelerator by another of its names.
    named = measured.model_copy(update={"accelerator": "cuda", "device": "NVIDIA A100-SXM4-80GB"})
    assert measured_node(named, Cluster(nodes=(*sheet.nodes, other))) == other


def test_an_all_reduce_bound_by_links_inside_does_not_measure_the_network() -> None:
    measured, sheet = on_hosts(1)
    points = tuple((size, 2e-4 + size * 1e-9) for size in SIZES)
    everyone = ProfiledLink(where="network", what="all_reduce", num_ranks=4, points=points, ranks_per_node=2)
    more = measured.model_copy(update={"links": (*measured.links, everyone)})
    assert measured_efficiency(more, sheet) == measured_efficiency(measured, sheet)


def test_one_host_does_not_measure_the_network_and_a_note_names_it() -> None:
    measured, sheet = on_hosts(1)
    assert measured_cluster(profile(), sheet) == sheet
    (note,) = profile_notes(profile(), sheet)
    assert note.startswith("the profile was measured on one host: links between hosts are those of the data sheet")
    assert not list(profile_notes(measured, sheet))
    larger = Cluster(nodes=tuple(replace(node, num_devices=8) for node in sheet.nodes))
    (note,) = profile_notes(measured, larger)
    assert "measured with 2 ranks on a host, and nodes have up to 8" in note


def test_a_note_names_sizes_measured_once() -> None:
    measured, sheet = on_hosts(1)
    layers = [
        each.model_copy(update={"points": tuple(point for point in each.points if point.end - point.start == 64)})
        if each.tensor_parallel_size == 2
        else each.model_copy(update={"points": each.points[:1]})
        for each in measured.layers
    ]
    assert list(profile_notes(measured.model_copy(update={"layers": tuple(layers)}), sheet)) == [
        f"the profile was measured only with {sizes}: op times of others are a guess; measure more sizes, or with a "
        "longer --budget-s"
        for sizes in (
            "micro-batches of 1 and token slices of 8 tokens (tensor-parallel size 1)",
            "token slices of 64 tokens (tensor-parallel size 2)",
        )
    ]


def test_an_all_reduce_of_two_full_nodes_is_then_priced_as_measured() -> None:
    points = tuple((size, 1e-3 + size * 4 * NETWORK_BYTE_S) for size in SIZES)
    link = ProfiledLink(where="network", what="all_reduce", num_ranks=8, points=points, ranks_per_node=4)
    nodes = tuple(replace(CLUSTER.nodes[0], name=name, num_devices=4) for name in ("a", "b"))
    measured = profile().model_copy(update={"num_nodes": 2, "links": (*profile().links, link)})
    efficiency = measured_efficiency(measured, Cluster(nodes=nodes))
    topology = GroupTopology(8, 2, LINK.bandwidth, 0.0, LINK.bandwidth, 0.0)
    assert float(all_reduce_s(2**24, topology, efficiency)) == pytest.approx(2**24 * 4 * NETWORK_BYTE_S, rel=0.05)
