"""The search finds the best of an exhaustive simulation, and reports its certainty."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.planning import check_trainable
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.rank.grid_prices import HEADROOM
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rules import SearchCounts, broken_rule, legal_grids
from megatron_terapipe.search.rank.search import search
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from tests.search.problems import mixed_cluster, small_cluster, small_problem


def pricing_on(problem: SearchProblem):
    return lambda cluster: Pricing(problem.workload, cluster, precision=problem.precision)


def few(problem: SearchProblem) -> Choices:
    return all_choices(problem).constrained(
        {
            "num_token_slices": (1, 2, 4),
            "num_model_chunks": (1, 2),
            "recompute": ("none", "full"),
            "stage_partition": ("uniform",),
        }
    )


def exhaustive(problem: SearchProblem, choices: Choices) -> list[float]:
    """Seconds of every strategy that fits and adds up in fp32, shortest first, all simulated."""
    pricing = Pricing(problem.workload, problem.cluster)
    times = []
    for legal in legal_grids(problem, choices, SearchCounts()):
        for flat in np.flatnonzero(legal.legal).tolist():
            place = [int(each) for each in np.unravel_index(flat, legal.grid.shape)]
            strategy = legal.grid.strategy(place, problem)
            if strategy.zero_stage == 0 and problem.precision == "bf16":
                continue
            prediction = pricing.predict(strategy)
            if pricing.why_it_does_not_fit(strategy, prediction.memory) is None:
                times.append(prediction.iteration_time_s)
    return sorted(times)


@pytest.mark.parametrize("memory_bytes", [40e9, 5.6e9])
def test_search_equals_exhaustive_simulation(memory_bytes: float) -> None:
    (node,) = small_cluster(num_nodes=1, num_devices=4).nodes
    device = replace(node.device, memory_bytes=memory_bytes)
    problem = small_problem(Cluster(nodes=(replace(node, device=device),)), num_layers=10)
    problem = replace(problem, memory_headroom=0.0)
    choices = few(problem)
    result = search(problem, choices, pricing_on(problem), top=5, refine=False, effort=5)
    times = exhaustive(problem, choices)
    assert result.proven
    assert [entry.prediction.iteration_time_s for entry in result.entries] == pytest.approx(times[:5], rel=1e-9)
    # Bounds are of use: only a part of what is feasible was simulated.
    assert result.counts.simulated < len(times) / 2
    assert [entry.rank for entry in result.entries] == [1, 2, 3, 4, 5]


def test_little_effort_reports_the_possible_saving() -> None:
    problem = small_problem(num_layers=10, global_batch_size=16)
    little = search(problem, all_choices(problem), pricing_on(problem), top=3, refine=False, effort=0.02)
    much = search(problem, all_choices(problem), pricing_on(problem), top=3, refine=False, effort=20)
    assert much.proven and much.could_save == 0
    assert little.counts.simulated < much.counts.simulated
    best = [result.entries[0].prediction.iteration_time_s for result in (little, much)]
    assert best[1] <= best[0] * (1 + 1e-9)
    # The reported saving is an upper bound.
    assert best[1] >= best[0] * (1 - little.could_save) * (1 - 1e-9)


def test_refining_keeps_to_the_pins_and_to_the_trainer() -> None:
    problem = small_problem(small_cluster(num_nodes=4, num_devices=1), num_layers=8, seq_length=1024)
    choices = all_choices(problem).constrained(
        {"pipeline_parallel_size": (4,), "num_token_slices": (2, 3, 4), "schedule": ("1f1b", "gpipe")}
    )
    result = search(problem, choices, pricing_on(problem), top=4)
    plain = search(problem, choices, pricing_on(problem), top=4, refine=False)
    best, plain_best = (each.entries[0].prediction.iteration_time_s for each in (result, plain))
    assert best <= plain_best
    for entry in result.entries:
        strategy = entry.strategy
        assert strategy.num_token_slices in (2, 3, 4) and strategy.schedule in ("1f1b", "gpipe")
        assert broken_rule(strategy, problem) is None
        check_trainable(strategy, problem.workload.config)


def test_a_mixed_cluster_gets_an_order_of_nodes() -> None:
    problem = small_problem(mixed_cluster(), num_layers=12, global_batch_size=16, hidden_size=2048, seq_length=2048)
    choices = all_choices(problem).constrained({"pipeline_parallel_size": (4,), "num_token_slices": (1, 2)})
    result = search(problem, choices, pricing_on(problem), top=3)
    winner = result.entries[0]
    pricing = Pricing(problem.workload, problem.cluster)
    # With its placement it has the same price in the order of the hostfile.
    again = pricing.predict(winner.strategy)
    assert again.iteration_time_s == pytest.approx(winner.prediction.iteration_time_s, rel=1e-9)
    unplaced = pricing.predict(replace(winner.strategy, placement=None))
    assert again.iteration_time_s <= unplaced.iteration_time_s * (1 + 1e-9)
    bounds = winner.strategy.stage_partition
    if winner.strategy.placement is not None:
        assert winner.cluster_in_order is not None
        assert sorted(winner.strategy.placement) == list(range(8))
    # Stages on fast devices have more layers.
    assert not isinstance(bounds, str) and len(set(np.diff(bounds).tolist())) > 1


def crowded(memory_bytes: float, headroom: float) -> SearchProblem:
    (node,) = small_cluster(num_nodes=1, num_devices=4).nodes
    device = replace(node.device, memory_bytes=memory_bytes)
    problem = small_problem(Cluster(nodes=(replace(node, device=device),)), num_layers=10)
    return replace(problem, memory_headroom=headroom)


def share_left(problem: SearchProblem, entry: Ranked) -> float:
    return 1 - entry.prediction.peak_memory_bytes / problem.cluster.nodes[0].device.memory_bytes


def test_every_ranked_strategy_leaves_the_headroom_free_and_the_fastest_other_is_named() -> None:
    plain = crowded(5.9e9, 0.0)
    fastest = search(plain, few(plain), pricing_on(plain), top=1).entries[0]
    left = share_left(plain, fastest)
    asked = replace(plain, memory_headroom=left + 0.02)
    result = search(asked, few(asked), pricing_on(asked), top=30, effort=3)
    assert result.entries
    assert all(share_left(asked, entry) >= asked.memory_headroom for entry in result.entries)
    # The rule has its own count, and every strategy is counted once.
    assert result.counts.rejected[HEADROOM] > 0
    full, winner = result.too_full, result.entries[0]
    assert full is not None and share_left(asked, full) < asked.memory_headroom
    assert full.prediction.iteration_time_s < winner.prediction.iteration_time_s
    enough = search(plain, few(plain), pricing_on(plain), top=1)
    assert enough.too_full is None and enough.counts.rejected[HEADROOM] == 0
