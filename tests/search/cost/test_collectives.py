"""Seconds of collectives: rings, their steps, and links that they cross."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.links import GroupTopology, all_gather_s, all_reduce_s, reduce_scatter_s, transfer_s

PERFECT = HardwareEfficiency(
    inside_efficiency=1.0,
    network_efficiency=1.0,
    transfer_network_efficiency=1.0,
    transfer_inside_efficiency=0.5,
    collective_s=0.0,
    transfer_s=0.0,
)
INSIDE = GroupTopology(8, 1, 300e9, 0.0, 1.0, 0.0)


def test_a_ring_sends_two_rounds_of_its_share() -> None:
    assert all_reduce_s(3e9, INSIDE, PERFECT) == pytest.approx(2 * 7 / 8 * 3e9 / 300e9)
    assert reduce_scatter_s(3e9, INSIDE, PERFECT) == pytest.approx(7 / 8 * 3e9 / 300e9)
    assert all_gather_s(3e9, INSIDE, PERFECT) == reduce_scatter_s(3e9, INSIDE, PERFECT)


def test_one_rank_has_nothing_to_tell() -> None:
    alone = INSIDE._replace(size=1)
    assert all_reduce_s(3e9, alone, HardwareEfficiency()) == 0
    assert reduce_scatter_s(3e9, alone, HardwareEfficiency()) == 0


def test_a_ring_over_nodes_is_as_fast_as_its_slowest_link() -> None:
    across = GroupTopology(24, 3, 300e9, 0.0, 100e9, 0.0)
    assert all_reduce_s(1e9, across, PERFECT) == pytest.approx(2 * 23 / 24 * 1e9 / 100e9)
    # One rank a node: nothing travels inside nodes, however slow they are.
    thin = GroupTopology(2, 2, 1.0, 0.0, 100e9, 0.0)
    assert all_reduce_s(1e9, thin, PERFECT) == pytest.approx(2 * 1 / 2 * 1e9 / 100e9)


def test_two_nodes_exchange_what_each_has_summed() -> None:
    pair = GroupTopology(16, 2, 300e9, 0.0, 100e9, 0.0)
    assert all_reduce_s(1e9, pair, PERFECT) == pytest.approx(1e9 / 100e9)
    # Gathering has no sums that could be sent in place of their terms.
    assert all_gather_s(1e9, pair, PERFECT) == pytest.approx(15 / 16 * 1e9 / 100e9)
    # What the nodes do inside takes its time, too.
    slow_inside = GroupTopology(16, 2, 10e9, 0.0, 100e9, 0.0)
    assert all_reduce_s(1e9, slow_inside, PERFECT) == pytest.approx(2 * 15 / 16 * 1e9 / 10e9)


def test_learned_factors_are_of_reductions_inside_a_node() -> None:
    learned = replace(PERFECT, reductions=tuple(float(index) for index in range(2, 2 + len(PERFECT.reductions))))
    inside, across = GroupTopology(2, 1, 300e9, 0.0, 1.0, 0.0), GroupTopology(24, 3, 300e9, 0.0, 100e9, 0.0)
    assert all_reduce_s(2**20, inside, learned) == pytest.approx(2 * all_reduce_s(2**20, inside, PERFECT))
    assert all_reduce_s(2**20, across, learned) == pytest.approx(all_reduce_s(2**20, across, PERFECT))


def test_small_messages_wait_for_latencies() -> None:
    topology = GroupTopology(16, 2, 300e9, 1e-6, 100e9, 10e-6)
    assert all_reduce_s(0.0, topology, PERFECT) == pytest.approx(2 * (7e-6 + 10e-6))


def test_grids_broadcast() -> None:
    sizes = np.array([1.0, 2.0, 8.0])
    topology = GroupTopology(sizes, np.ones(3), 300e9, 0.0, 1.0, 0.0)
    assert all_reduce_s(np.array([[1e9], [2e9]]), topology, HardwareEfficiency()).shape == (2, 3)


def test_a_message_inside_a_node_reaches_less_of_its_link() -> None:
    crosses = np.array([False, True])
    assert transfer_s(1e9, 10e9, 1e-3, crosses, PERFECT).tolist() == pytest.approx([0.201, 0.101])
