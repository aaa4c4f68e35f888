"""Which parts of a cluster are tried."""

from dataclasses import replace

from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.rank.alternatives import sizes_of_parts
from tests.search.problems import FAST, SLOW, node, small_cluster

SLOWER = replace(SLOW, name="slower", half_flops=50e12)
MIXED = Cluster(nodes=(node("a", SLOW), node("b", SLOWER), node("c", FAST), node("d", FAST)))


def test_slow_kinds_are_left_out_first_and_equal_nodes_halved() -> None:
    assert sizes_of_parts(MIXED) == [6, 4, 2]
    assert [[each.name for each in MIXED.at_most(size).nodes] for size in (6, 4, 2)] == [
        ["a", "c", "d"],
        ["c", "d"],
        ["c"],
    ]
    # Numbers of nodes that divide all of them, or are powers of two.
    assert sizes_of_parts(small_cluster(num_nodes=12)) == [12, 6, 2]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=8)) == [4, 2, 1]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=1)) == []


def test_a_part_has_whole_nodes_while_there_is_room() -> None:
    assert MIXED.at_most(5).num_devices == 4 and MIXED.at_most(100) == Cluster(nodes=MIXED.nodes)
    (alone,) = MIXED.at_most(1).nodes
    assert alone.name == "c" and alone.num_devices == 1
