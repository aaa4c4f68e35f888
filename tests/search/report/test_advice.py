"""The advice in words: where fewer devices are better, what headroom costs, what decides who wins, what is missing."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.advice import Advice, TooFull, advice_notes, advice_part, distance_text
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.rank.alternatives import FewerDevices, on_fewer_devices
from megatron_terapipe.search.rank.distance_to_fit import DistanceToFit, Remedy, nearest_to_fitting
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.rank.sensitivity import OtherWinner, Sensitivity
from megatron_terapipe.search.rank.space import SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy
from tests.search.problems import FAST, SLOW, node, small_cluster, small_problem

CONSTRAINTS = {"schedule": ("1f1b",), "num_token_slices": (1,), "recompute": ("none",), "num_model_chunks": (1,)}
PLAIN = Strategy(data_parallel_size=4, global_batch_size=8)


def parts_for(problem: SearchProblem) -> tuple[FewerDevices, ...]:
    def pricing_on(part: Cluster) -> Pricing:
        return Pricing(problem.workload, part)

    winner = search(problem, all_choices(problem).constrained(CONSTRAINTS), pricing_on, top=1).entries[0]
    return on_fewer_devices(winner, problem, CONSTRAINTS, pricing_on)


def test_a_slow_machine_behind_a_slow_link_is_better_left_out() -> None:
    useless = replace(SLOW, half_flops=2e12, memory_bandwidth=20e9)
    for device, network, said in ((useless, 0.05e9, True), (replace(FAST, name="other"), 400e9, False)):
        cluster = Cluster(nodes=(node("a", FAST, network=network), node("b", device, network=network)))
        problem = small_problem(cluster, global_batch_size=64)
        notes = advice_notes(Advice(fewer_devices=parts_for(problem)), problem)
        assert bool(notes) == said, notes
        if notes:
            assert "on 2 of the 4 devices, without the nodes of slow, an iteration takes " in notes[0]
            assert notes[0].endswith("add --devices-at-most 2 to rank them")


def test_equal_nodes_behind_a_slow_link_are_worse_than_one_of_them() -> None:
    for network, faster in ((0.02e9, True), (400e9, False)):
        nodes = tuple(node(f"host{index}", network=network) for index in range(4))
        problem = small_problem(Cluster(nodes=nodes), global_batch_size=64)
        found = parts_for(problem)
        notes = advice_notes(Advice(fewer_devices=found), problem)
        assert any(note.startswith("FEWER DEVICES ARE FASTER: on 2 of the 8 devices") for note in notes) == faster
        for part in found:
            share = part.cluster.num_devices / problem.cluster.num_devices
            assert part.cost_ratio == pytest.approx(part.time_ratio * share)
            # It is a strategy for the part, at the price that it has there.
            assert part.entry.strategy.world_size == part.cluster.num_devices
            price = Pricing(problem.workload, part.cluster).predict(part.entry.strategy)
            assert part.entry.prediction is not None
            assert price.iteration_time_s == pytest.approx(part.entry.prediction.iteration_time_s)
        if faster:
            assert [part.cluster.num_devices for part in found] == [4, 2]


def test_what_headroom_costs() -> None:
    problem = small_problem()
    entry = Ranked(strategy=PLAIN, prediction=Pricing(problem.workload, problem.cluster).predict(PLAIN))
    (note,) = advice_notes(Advice(too_full=TooFull(entry=entry, left_free=0.0217, could_save=0.03)), problem)
    assert "leaves 2.2% of a device's memory free, less than the 5 % asked for" in note
    assert note.endswith("--memory-headroom 0.021 allows it and saves 3.0%")
    # What saves next to nothing is in the document alone.
    assert advice_notes(Advice(too_full=TooFull(entry=entry, left_free=0.0217, could_save=0.004)), problem) == []


def test_what_decides_who_wins() -> None:
    problem = small_problem()
    network = OtherWinner(constant="network_efficiency", change=-0.1, strategy=PLAIN, regret=0.02)
    full = OtherWinner(constant="activation_factor", change=0.1, strategy=PLAIN, regret=0.01, is_memory=True)
    found = Sensitivity(changes=(network, full), nearest=None, num_constants=25, num_contenders=6)
    (note,) = advice_notes(Advice(sensitivity=found), problem)
    assert "network_efficiency (share of a network card that collectives reach) 10% lower" in note
    assert "rank 1 takes 2.0% longer; so do activation_factor +10% (1.0%)" in note
    # A change that costs next to nothing is named, and not called a doubt.
    little = Sensitivity(changes=(replace(network, regret=0.004),), nearest=None, num_constants=25, num_contenders=6)
    (note,) = advice_notes(Advice(sensitivity=little), problem)
    assert note.startswith("no constant that is 10% off makes rank 1 more than 0.4% slower than another strategy; with")
    alone = Sensitivity(changes=(), nearest=None, num_constants=25, num_contenders=1)
    assert advice_notes(Advice(sensitivity=alone), problem) == []
    none = Sensitivity(changes=(), nearest=replace(network, change=0.3), num_constants=25, num_contenders=6)
    (note,) = advice_notes(Advice(sensitivity=none), problem)
    assert note.startswith("no constant that is 10% off changes the winner (25 constants, 6 strategies)")
    assert "network_efficiency (share of a network card that collectives reach) 30% higher" in note
    part = advice_part(Advice(sensitivity=found))
    assert part.sensitivity is not None and part.sensitivity.changes[0].constant == "network_efficiency"


def test_what_is_missing_and_what_would_make_it_fit() -> None:
    problem = small_problem(small_cluster(device=replace(FAST, memory_bytes=1e9)))
    nearest = nearest_to_fitting(problem, {}, Pricing)
    assert nearest is not None
    remedies = tuple(Remedy(kind=kind, value=value, found=nearest) for kind, value in (
        ("devices", 8), ("seq_length", 256), ("key_value_gradients", "bf16"),
        ("constraint", "recompute"), ("constraint", "")))  # fmt: skip
    distance = DistanceToFit(nearest=nearest, remedies=remedies)
    text = distance_text(distance, problem)
    assert "of 950 MB that a fast has (5 % kept free); it would fit with 8 such devices (4 nodes) or " in text
    assert "or --seq-length 256 or --key-value-gradients bf16 or --recompute free or devices of " in text
    (note,) = advice_notes(Advice(distance=distance), problem)
    assert "framework 3.5 GB" in note and note.endswith("of 950 MB")
    document = advice_part(Advice(distance=distance)).distance_to_fit
    assert document is not None and document.memory["total"] == pytest.approx(nearest.memory.total)
