"""A constant that changes the winner is found, with the regret that a simulation gives."""

from dataclasses import replace
from math import log

import pytest

from megatron_terapipe.search.answer.sensitivity import FACTOR, moves_of, sensitivity, widths_of
from megatron_terapipe.search.learn.calibration import NETWORK, no_calibration
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior, moved
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.search.rank.search import Ranked, contenders_of, ranked_in_order
from megatron_terapipe.strategy import Strategy
from tests.search.problems import FAST, small_cluster, small_problem

ONE_NODE = Strategy(data_parallel_size=4, global_batch_size=32)
PIPELINE = Strategy(pipeline_parallel_size=4, global_batch_size=32)


def ranked(pricing: Pricing, *strategies: Strategy) -> list[Ranked]:
    return ranked_in_order(Ranked(strategy=one, prediction=pricing.predict(one)) for one in strategies)


def near_tie() -> Pricing:
    """Prices where replicas and a pipeline take within 1 % of each other, because the network is just so slow."""
    problem = small_problem(global_batch_size=32)
    low, high = 0.1e9, 400e9
    for _ in range(40):
        bandwidth = (low * high) ** 0.5
        nodes = tuple(
            replace(node, network=replace(node.network, bandwidth=bandwidth)) for node in problem.cluster.nodes
        )
        pricing = Pricing(problem.workload, Cluster(nodes=nodes))
        replicas, pipeline = (pricing.predict(one).iteration_time_s for one in (ONE_NODE, PIPELINE))
        if abs(replicas / pipeline - 1) < 0.002:
            return pricing
        low, high = (bandwidth, high) if replicas > pipeline else (low, bandwidth)
    raise AssertionError("no bandwidth makes them equal")


def test_a_bandwidth_that_decides_is_found() -> None:
    pricing = near_tie()
    contenders = contenders_of(ranked(pricing, ONE_NODE, PIPELINE))
    found = sensitivity(contenders, pricing, no_calibration())
    assert found.num_contenders == 2 and found.network_bandwidth is not None
    # Faster networks suit replicas, slower ones the pipeline.
    replicas_win = contenders[0].strategy == ONE_NODE
    (change,) = found.network
    assert change.strategy == contenders[1].strategy.to_json()
    assert (change.bandwidth < found.network_bandwidth) == replicas_win
    assert 0.25 < change.bandwidth / found.network_bandwidth < 4

    # Simulated from there on the other is more than 1 % faster; the regret is that at the last bandwidth.
    def regret(scale: float) -> float:
        model = pricing.cost_model
        then = model.with_efficiency(moved(model.efficiency, NETWORK, log(scale)))
        first, second = (then.predict_time(entry.strategy).iteration_time_s for entry in contenders)
        return first / second - 1

    assert regret(change.bandwidth / found.network_bandwidth) == pytest.approx(0.01, abs=0.01)
    assert change.regret == pytest.approx(regret(1 / FACTOR if replicas_win else FACTOR)) and change.regret > 0.02
    assert not {each.constant for each in found.changes} & set(NETWORK)


def test_constants_are_moved_by_their_uncertainty() -> None:
    pricing = near_tie()
    contenders = contenders_of(ranked(pricing, ONE_NODE, PIPELINE))
    trials_on = {name: replace(no_calibration(), efficiency=HardwareEfficiency(), several_nodes=name) for name in BOTH}
    known, unknown = (sensitivity(contenders, pricing, trials_on[name]) for name in BOTH)
    assert known.network == [] and known.network_bandwidth is None and unknown.network
    (change,) = (each for each in known.changes if each.constant == "network_efficiency")
    assert abs(log(1 + change.change)) <= Prior.of(HardwareEfficiency()).widths.max()
    assert change.regret > 0.01 and change.strategy == contenders[1].strategy.to_json()
    assert [each.regret for each in known.changes] == sorted((each.regret for each in known.changes), reverse=True)
    # Trials that determine the constants leave nothing to change.
    intervals = replace(known_intervals := no_calibration().intervals, covariance=1e-8 * known_intervals.covariance)
    sure = sensitivity(contenders, pricing, replace(trials_on[True], intervals=intervals))
    assert not [each for each in sure.changes if not each.is_memory]
    alone = sensitivity(contenders[:1], pricing, no_calibration())
    assert not alone.network and not [each for each in alone.changes if not each.is_memory]


BOTH = (True, False)


def test_memory_that_runs_out_is_found() -> None:
    problem = small_problem(global_batch_size=32)
    large, lean = replace(ONE_NODE, micro_batch_size=8), replace(ONE_NODE, micro_batch_size=1, recompute="full")
    peak = max(rank.total for rank in Pricing(problem.workload, problem.cluster).memory_model.predict(large))
    pricing = Pricing(problem.workload, small_cluster(device=replace(FAST, memory_bytes=peak * 1.01)))
    contenders = ranked(pricing, large, lean)
    contenders.sort(key=lambda entry: entry.strategy != large)
    short = [each for each in sensitivity(contenders, pricing, no_calibration()).changes if each.is_memory]
    found = {each.constant: each.strategy for each in short}
    assert found["activation_factor"] == lean.to_json() and found["framework_bytes"] in (None, lean.to_json())


def test_shares_stay_shares() -> None:
    overheads = MemoryOverheads()
    widths = widths_of(overheads, no_calibration())
    assert {name for name, _, _ in moves_of(overheads, widths)} == set(widths) and "usable_share" not in widths
    assert set(widths_of(overheads, replace(no_calibration(), num_memory_trials=9)).values()) == {0.12, 0.08, 0.03}
    efficiency = moved(HardwareEfficiency(), ["gemm_efficiency"], 0.13)
    widths = widths_of(efficiency, no_calibration())
    for name, logarithm, constants in moves_of(efficiency, widths):
        assert getattr(constants, name) != getattr(efficiency, name) and constants.gemm_efficiency < 1
        assert abs(logarithm) <= widths.get(name, widths["reductions[0]"]) + 1e-9
