"""Who sends to whom when the links of nodes are measured."""

import pytest

from megatron_terapipe.search.measure.sizes import Nodes, link_classes


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([[0]], []),
        ([[0, 1, 2]], ["all-reduces of the 3 ranks of a node", "messages inside a node"]),
        ([[0], [1]], ["all-reduces of one rank of each of 2 nodes", "messages between nodes"]),
        (
            [[0, 1], [2, 3, 4], [5, 6]],
            [
                "all-reduces of the 2 ranks of a node",
                "messages inside a node",
                "all-reduces of one rank of each of 3 nodes",
                "messages between nodes",
                "all-reduces of one rank of each of 3 nodes, 2 at a time",
                "all-reduces of all 6 ranks",
                "messages between nodes, 2 at a time",
            ],
        ),
    ],
)
def test_each_class_is_measured_once(nodes: Nodes, words: list[str]) -> None:
    assert [each.words for each in link_classes(nodes)] == words


def test_flows_share_the_cards_of_their_node() -> None:
    node_of = {rank: rank // 2 for rank in range(8)}
    for each in link_classes([[0, 1], [2, 3], [4, 5], [6, 7]]):
        ranks = [rank for group in each.groups for rank in group]
        assert len(set(ranks)) == len(ranks), "a rank is in one group"
        for group in each.groups:
            of_nodes = [sum(node_of[rank] == node for rank in group) for node in {node_of[rank] for rank in group}]
            assert set(of_nodes) == {each.ranks_per_node}
            assert (len(of_nodes) > 1) == (each.where == "network")
            at_once = [other for other in each.groups if {node_of[r] for r in other} & {node_of[r] for r in group}]
            assert len(at_once) == each.flows
