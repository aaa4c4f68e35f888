"""What is said of a winner that nearly fills its devices, and of devices that it would be better without."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.command.warnings import FULL, fewer_devices_note, fullness, memory_note
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.rank.fewer_devices import FewerDevices, on_fewer_devices
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.space.choices import all_choices
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.strategy import Strategy
from tests.search.problems import FAST, SLOW, node, small_cluster, small_problem

CONSTRAINTS = {"schedule": ("1f1b",), "num_token_slices": (1,), "recompute": ("none",), "num_model_chunks": (1,)}


def entries_on(cluster: Cluster, problem: SearchProblem, *strategies: Strategy) -> tuple[list[Ranked], Pricing]:
    pricing = Pricing(problem.workload, cluster)
    priced = [
        Ranked(strategy=strategy, prediction=pricing.predict(strategy), rank=rank)
        for rank, strategy in enumerate(strategies, start=1)
    ]
    return priced, pricing


def test_memory_is_spoken_of_only_where_it_is_short() -> None:
    problem = small_problem()
    large = Strategy(data_parallel_size=4, micro_batch_size=2, global_batch_size=8)
    lean = replace(large, micro_batch_size=1, recompute="full")
    entries, pricing = entries_on(problem.cluster, problem, large, lean)
    assert fullness(entries[0], pricing) < FULL and memory_note(entries, pricing) is None

    # A device that the first one fills to 99 %, and the second one does not.
    assert entries[0].prediction is not None
    tight = replace(FAST, memory_bytes=entries[0].prediction.peak_memory_bytes / 0.99)
    entries, pricing = entries_on(small_cluster(device=tight), problem, large, lean)
    note = memory_note(entries, pricing)
    assert note is not None and "99%" in note and "rank 2" in note
    alone = memory_note(entries[:1], pricing)
    assert alone is not None and "nothing listed here leaves 5 %" in alone


def test_a_slow_machine_behind_a_slow_link_is_better_left_out() -> None:
    useless = replace(SLOW, half_flops=2e12, memory_bandwidth=20e9)
    for device, network, said in ((useless, 0.05e9, True), (replace(FAST, name="other"), 400e9, False)):
        cluster = Cluster(nodes=(node("a", FAST, network=network), node("b", device, network=network)))
        problem = small_problem(cluster, global_batch_size=64)
        note = fewer_devices_note(parts_for(problem), problem)
        assert (note is not None) == said, note
        if note is not None:
            assert "on 2 of the 4 devices, without the nodes of slow, an iteration takes " in note
            assert note.endswith("add --devices-at-most 2 to rank them")


def test_equal_nodes_behind_a_slow_link_are_worse_than_one_of_them() -> None:
    for network, faster in ((0.02e9, True), (400e9, False)):
        nodes = tuple(node(f"host{index}", network=network) for index in range(4))
        problem = small_problem(Cluster(nodes=nodes), global_batch_size=64)
        found = parts_for(problem)
        note = fewer_devices_note(found, problem)
        assert (note is not None and note.startswith("FEWER DEVICES ARE FASTER: on 2 of the 8 devices")) == faster
        for part in found:
            share = part.cluster.num_devices / problem.cluster.num_devices
            assert part.cost_ratio == pytest.approx(part.time_ratio * share)
            # It is a strategy for the part, at the price that it has there.
            assert part.entry.strategy.world_size == part.cluster.num_devices
            price = Pricing(problem.workload, part.cluster).predict(part.entry.strategy)
            assert price.iteration_time_s == pytest.approx(part.entry.prediction.iteration_time_s)
        if faster:
            assert [part.cluster.num_devices for part in found] == [4, 2]


def parts_for(problem: SearchProblem) -> tuple[FewerDevices, ...]:
    def pricing_on(part: Cluster) -> Pricing:
        return Pricing(problem.workload, part)

    winner = search(problem, all_choices(problem).constrained(CONSTRAINTS), pricing_on, top=1).entries[0]
    return on_fewer_devices(winner, problem, CONSTRAINTS, pricing_on)
