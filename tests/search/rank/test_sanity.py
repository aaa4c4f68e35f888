"""Sanity of the cost model: better machines are no slower, and the order of nodes does not matter."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.rank.node_orders import better_order, kind_key, node_orders, placement_of
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.rank.space import all_choices
from tests.search.problems import drawn, mixed_cluster, small_problem


def answer(cluster: Cluster, batch: int = 8) -> SearchResult:
    problem = small_problem(cluster, global_batch_size=batch, hidden_size=2048)
    constraints = {
        "num_token_slices": (1, 2),
        "micro_batch_size": (1, 2),
        "recompute": ("none",),
        "num_model_chunks": (1, 2),
    }
    choices = all_choices(problem).constrained(constraints)
    return search(problem, choices, lambda nodes: Pricing(problem.workload, nodes), top=3, refine=False)


def better(node: Node, factor: float, part: str) -> Node:
    if part == "network":
        return replace(node, network=replace(node.network, bandwidth=node.network.bandwidth * factor))
    if part == "inside":
        return replace(node, inside=replace(node.inside, bandwidth=node.inside.bandwidth * factor))
    if part == "latency":
        return replace(node, network=replace(node.network, latency_s=node.network.latency_s / factor))
    values = {part: getattr(node.device, part) * factor}
    return replace(node, device=replace(node.device, **values))


PARTS = ["network", "inside", "latency", "half_flops", "memory_bandwidth", "memory_bytes"]


@pytest.mark.parametrize("part", PARTS)
def test_better_machines_make_no_strategy_slower(part: str) -> None:
    problem = small_problem()
    cluster = problem.cluster
    improved = Cluster(nodes=tuple(better(node, 3.0, part) for node in cluster.nodes))
    before, after = Pricing(problem.workload, cluster), Pricing(problem.workload, improved)
    for strategy in drawn(problem, 12, seed=5):
        slower, faster = before.predict(strategy), after.predict(strategy)
        assert faster.iteration_time_s <= slower.iteration_time_s * (1 + 1e-9), strategy


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 3, 0, 2)])
def test_order_of_nodes_in_the_hostfile_does_not_matter(order: tuple[int, ...]) -> None:
    cluster = mixed_cluster()
    shuffled = Cluster(nodes=tuple(cluster.nodes[index] for index in order))
    first, second = (answer(each) for each in (cluster, shuffled))
    assert len(first.entries) == len(second.entries) == 3
    for one, other in zip(first.entries, second.entries, strict=True):
        assert one.prediction.iteration_time_s == pytest.approx(other.prediction.iteration_time_s, rel=1e-9)
        assert replace(one.strategy, placement=None) == replace(other.strategy, placement=None)
        # Ranks are on the same kinds of nodes.
        kinds = [
            [kind_key(nodes.nodes[nodes.node_of_device[place]]) for place in entry.strategy.placement or range(8)]
            for entry, nodes in ((one, cluster), (other, shuffled))
        ]
        assert kinds[0] == kinds[1]


def test_orders_of_nodes_are_unique() -> None:
    cluster = mixed_cluster()
    orders = node_orders(cluster)
    kinds = {tuple(map(kind_key, order.nodes)) for order in orders}
    assert len(orders) == len(kinds) == 6  # two and two nodes: 4! / (2! 2!)
    assert all(sorted(node.name for node in order.nodes) == ["a", "b", "c", "d"] for order in orders)
    for order in orders:
        placement = placement_of(order, cluster, 8) or tuple(range(8))
        names = [cluster.nodes[cluster.node_of_device[place]].name for place in placement]
        assert names == [node.name for node in order.nodes for _ in range(2)]


def test_a_local_search_improves_an_order() -> None:
    cluster = mixed_cluster()
    rank = {node.name: index for index, node in enumerate(cluster.nodes)}

    def score(order: Cluster) -> float:
        """Least if the fast nodes, a and c, come first."""
        return float(sum(index for index, node in enumerate(order.nodes) if node.name in "ac"))

    best = better_order(cluster, score, evaluations=30)
    assert {node.name for node in best.nodes[:2]} == {"a", "c"}
    assert sorted(rank[node.name] for node in best.nodes) == [0, 1, 2, 3]
    assert score(better_order(cluster, score, evaluations=1)) == score(cluster)
