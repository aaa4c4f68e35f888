"""A constant that changes the winner is found, with the regret that a simulation gives."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.sensitivity import moves_of, sensitivity
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import moved
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.search.rank.ranked import Ranked, contenders_of, ranked_in_order
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


def test_a_constant_that_decides_is_found() -> None:
    pricing = near_tie()
    contenders = contenders_of(ranked(pricing, ONE_NODE, PIPELINE))
    found = sensitivity(contenders, pricing)
    by_name = {(each.constant, each.change > 0): each for each in found.changes}
    replicas_win = contenders[0].strategy == ONE_NODE
    change = by_name["network_efficiency", not replicas_win]
    assert change.strategy == contenders[1].strategy.to_json() and abs(change.change) == pytest.approx(0.1)
    # The regret is that of a simulation with the moved constant.
    model = pricing.cost_model
    then = model.with_efficiency(
        replace(model.efficiency, network_efficiency=model.efficiency.network_efficiency * (1 + change.change))
    )
    first, second = (then.predict_time(entry.strategy).iteration_time_s for entry in contenders)
    assert change.regret == pytest.approx(first / second - 1) and change.regret > 0.002
    assert found.nearest is None and found.num_contenders == 2
    assert [each.regret for each in found.changes] == sorted((each.regret for each in found.changes), reverse=True)


def test_where_none_decides_the_nearest_is_named() -> None:
    pricing = Pricing(small_problem(global_batch_size=32).workload, small_cluster(num_nodes=1, num_devices=4))
    contenders = ranked(pricing, ONE_NODE, PIPELINE)
    found = sensitivity(contenders, pricing)
    assert not found.changes
    if found.nearest is not None:
        assert 0.1 < abs(found.nearest.change) <= 1.0
    alone = sensitivity(contenders[:1], pricing)
    assert not alone.changes and alone.nearest is None


def test_memory_that_runs_out_is_found() -> None:
    problem = small_problem(global_batch_size=32)
    large, lean = replace(ONE_NODE, micro_batch_size=8), replace(ONE_NODE, micro_batch_size=1, recompute="full")
    peak = max(rank.total for rank in Pricing(problem.workload, problem.cluster).memory_model.predict(large))
    pricing = Pricing(problem.workload, small_cluster(device=replace(FAST, memory_bytes=peak * 1.01)))
    contenders = ranked(pricing, large, lean)
    contenders.sort(key=lambda entry: entry.strategy != large)
    short = [each for each in sensitivity(contenders, pricing).changes if each.is_memory]
    assert {"activation_factor"} <= {each.constant for each in short}
    assert all(each.strategy == lean.to_json() for each in short)


def test_shares_stay_shares() -> None:
    overheads = MemoryOverheads()
    names = {name for name, _, _ in moves_of(overheads)}
    assert "usable_share" not in names and "state_factor" in names
    efficiency = moved(
        Pricing(small_problem().workload, small_cluster()).cost_model.efficiency, ["gemm_efficiency"], 0.13
    )
    for name, change, constants in moves_of(efficiency):
        assert abs(change) <= 0.1 and getattr(constants, name) != getattr(efficiency, name)
        assert constants.gemm_efficiency < 1
