"""A constant that changes the winner is found, with the regret that a simulation gives."""

from dataclasses import fields, replace
from math import log

import pytest

from megatron_terapipe.search.answer.what_if import FACTOR, moves_of, other_constants, widths_of
from megatron_terapipe.search.learn.calibration import NETWORK, no_calibration
from megatron_terapipe.search.learn.priors import moved
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, ProfileFactors
from megatron_terapipe.search.rank.search import Ranked, contenders_of, ranked_in_order
from megatron_terapipe.strategy import Strategy
from tests.search.problems import small_problem

REPLICAS = Strategy(data_parallel_size=4, global_batch_size=32)
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
        replicas, pipeline = (pricing.predict(one).iteration_time_s for one in (REPLICAS, PIPELINE))
        if abs(replicas / pipeline - 1) < 0.002:
            return pricing
        low, high = (bandwidth, high) if replicas > pipeline else (low, bandwidth)
    raise AssertionError("no bandwidth makes them equal")


def test_a_bandwidth_that_decides_is_found() -> None:
    pricing = near_tie()
    contenders = contenders_of(ranked(pricing, REPLICAS, PIPELINE))
    found = list(other_constants(contenders, pricing.cost_model, no_calibration()))
    # Faster networks suit replicas, slower ones the pipeline.
    step = -log(FACTOR) if contenders[0].strategy == REPLICAS else log(FACTOR)
    (change,) = (each for each in found if each.name == "network")
    assert change.strategy == contenders[1].strategy
    assert isinstance(change.value, float) and log(1 + change.value) == pytest.approx(step)
    then = pricing.cost_model.with_constants(moved(pricing.cost_model.efficiency, dict.fromkeys(NETWORK, step)))
    first, second = (then.predict_time(entry.strategy).iteration_time_s for entry in contenders)
    assert change.iteration_time_s == pytest.approx(second) and change.change == pytest.approx(1 - second / first)
    assert " Gbit/s a node, not " in change.line and f"is {first / second - 1:.0%} faster" in change.line
    assert not {each.value for each in found} & set(NETWORK)


def test_constants_are_moved_by_their_uncertainty() -> None:
    pricing = near_tie()
    contenders = contenders_of(ranked(pricing, REPLICAS, PIPELINE))
    trials_on = {
        name: no_calibration().model_copy(update={"efficiency": HardwareEfficiency(), "several_nodes": name})
        for name in BOTH
    }
    known, unknown = (list(other_constants(contenders, pricing.cost_model, trials_on[name])) for name in BOTH)
    assert "network" not in {each.name for each in known} and "network" in {each.name for each in unknown}
    (change,) = (each for each in known if each.value == "network_efficiency")
    assert change.name == "constant" and change.change > 0.01 and change.strategy == contenders[1].strategy
    assert change.line.startswith("bandwidth of collectives between nodes ") and change.more.startswith(
        "Share of a network card"
    )
    assert [each.change for each in known] == sorted((each.change for each in known), reverse=True)
    # Trials that determine the constants leave nothing to change.
    wide = no_calibration().intervals
    intervals = wide.model_copy(update={"covariance": 1e-8 * wide.covariance})
    sure = other_constants(contenders, pricing.cost_model, trials_on[True].model_copy(update={"intervals": intervals}))
    assert not list(sure) and not list(other_constants(contenders[:1], pricing.cost_model, no_calibration()))


BOTH = (True, False)


def test_constants_have_words() -> None:
    declared = [each.metadata for of in (HardwareEfficiency, ProfileFactors) for each in fields(of)]
    assert sum("width" in each for each in declared) == 23
    assert all(each["words"] for each in declared if "width" in each)


def test_shares_stay_shares() -> None:
    efficiency = moved(HardwareEfficiency(), {"gemm_efficiency": 0.13})
    widths = widths_of(efficiency, no_calibration())
    for name, logarithm, constants in moves_of(efficiency, widths):
        assert getattr(constants, name) != getattr(efficiency, name) and constants.gemm_efficiency < 1
        assert abs(logarithm) <= widths.get(name, widths["reductions[0]"]) + 1e-9
