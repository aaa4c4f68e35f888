"""The search finds the best of an exhaustive simulation, and reports its certainty; orders of nodes do not matter."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.planning import check_trainable
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.learn.calibration import no_calibration
from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.rank import search as searching
from megatron_terapipe.search.rank.grid_prices import FITS, HEADROOM
from megatron_terapipe.search.rank.node_orders import kind_key, node_orders, placement_of
from megatron_terapipe.search.rank.rules import SearchCounts, broken_rule, legal_grids
from megatron_terapipe.search.rank.search import (
    NEARLY_AS_FAST,
    Ranked,
    SearchResult,
    best_of_layouts,
    memory_step,
    ranked_in_order,
    search,
)
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy
from tests.search.answer.answers import prediction
from tests.search.problems import FAST, drawn, legal_strategies, mixed_cluster, question, small_cluster, small_problem


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


def exhaustive(problem: SearchProblem, choices: Choices) -> list[Ranked]:
    """Every strategy that fits and adds up in fp32, best first, all simulated."""
    pricing = Pricing(problem.workload, problem.cluster)
    found = []
    for strategy in legal_strategies(problem, choices):
        if strategy.zero_stage == 0 and problem.precision == "bf16":
            continue
        prediction = pricing.predict(strategy)
        if pricing.why_it_does_not_fit(strategy, prediction.memory) is None:
            found.append(Ranked(strategy=strategy, prediction=prediction))
    return ranked_in_order(found)


@pytest.mark.parametrize("memory_bytes", [40e9, 5.6e9])
def test_search_equals_exhaustive_simulation(memory_bytes: float) -> None:
    (node,) = small_cluster(num_nodes=1, num_devices=4).nodes
    device = replace(node.device, memory_bytes=memory_bytes)
    problem = small_problem(Cluster(nodes=(replace(node, device=device),)), num_layers=10)
    problem = replace(problem, memory_headroom=0.0)
    choices = few(problem)
    everything = exhaustive(problem, choices)
    fastest_s = min(each.iteration_time_s for each in everything)
    for all_variants in (False, True):
        result = search(problem, choices, pricing_on(problem), top=5, refine=False, effort=5, all_variants=all_variants)
        # Bounds are of use: only a part of what is feasible was simulated.
        assert result.proven and result.counts.simulated < len(everything) / 2
        assert [entry.rank for entry in result.entries] == [1, 2, 3, 4, 5]
        winner = result.entries[0]
        assert winner.iteration_time_s <= NEARLY * fastest_s
        assert memory_step(winner.price.peak_memory_bytes) == memory_step(everything[0].price.peak_memory_bytes)
        if all_variants:
            fifth_s = sorted(each.iteration_time_s for each in everything)[4]
            assert all(entry.iteration_time_s <= NEARLY * fifth_s for entry in result.entries)
            assert all(entry.variants is None for entry in result.entries)
            continue
        # A row is the best variant of a layout, and no layout is missing before it.
        expected = best_of_layouts(everything, 512)[:5]
        assert [entry.strategy.layout for entry in result.entries] == [each.strategy.layout for each in expected]
        for entry in result.entries:
            same = [each for each in everything if each.strategy.layout == entry.strategy.layout]
            assert entry.iteration_time_s <= NEARLY**2 * min(each.iteration_time_s for each in same)
            assert entry.variants == len(same) or (memory_bytes < 40e9 and entry.variants >= len(same))


NEARLY = 1 + NEARLY_AS_FAST


def test_among_the_nearly_as_fast_less_memory_comes_first() -> None:
    def entry(time_s: float, peak: float, micro_batch: int, reason: str | None = None) -> Ranked:
        price = replace(prediction(time_s, 0.0, ranks=1, peak=peak), iteration_time_s=time_s)
        return Ranked(strategy=Strategy(micro_batch_size=micro_batch), prediction=price, reason=reason)

    in_order = [
        entry(1.008, 5.0e9, 1),  # the least memory of the nearly as fast
        entry(1.004, 8.02e9, 2),  # as much memory as the next, and faster
        entry(1.009, 8.01e9, 3),
        entry(1.000, 9.0e9, 4),  # the fastest
        entry(1.011, 1.0e9, 5),
        entry(1.5, 1.0e9, 6),
        entry(0.5, 1.0e9, 7, "does not fit"),
    ]
    for entries in (in_order, in_order[::-1], in_order[3:] + in_order[:3]):
        assert [each.strategy.micro_batch_size for each in ranked_in_order(entries)] == [1, 2, 3, 4, 5, 6, 7]


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


class OnlyRecomputed(Pricing):
    """Prices where no other strategy fits, as by an exact count of memory that a bound is far below."""

    def why_it_does_not_fit(self, strategy: Strategy, *given: object) -> str | None:
        return None if strategy.recompute == "full" else "out of memory"


def test_where_none_of_the_fastest_fits_the_emptiest_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MOST_STRATEGIES", 6)
    problem = small_problem(small_cluster(num_nodes=1, num_devices=4), num_layers=10)

    def made(cluster: Cluster) -> Pricing:
        return OnlyRecomputed(problem.workload, cluster)

    result = search(problem, few(problem), made, top=1, refine=False)
    assert result.counts.rejected[FITS] >= 6 and result.counts.simulated == 1
    assert [entry.strategy.recompute for entry in result.entries] == ["full"]


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


ON_CPUS = Cluster(nodes=tuple(replace(node, device=replace(FAST, is_gpu=False)) for node in small_cluster().nodes))


@pytest.mark.parametrize(
    ("cluster", "constraints", "trials_have_it", "is_tried"),
    [
        (small_cluster(), {}, False, False),
        (small_cluster(), {"schedule": ("1f1b", "interleaved")}, False, False),
        (small_cluster(), {"num_token_slices": (1, 4)}, False, False),
        (small_cluster(), {"schedule": ("1f1b", "interleaved"), "num_token_slices": (1, 4)}, False, True),
        (small_cluster(), {"schedule": ("breadth-first",)}, False, False),
        (small_cluster(), {"schedule": ("breadth-first",), "num_token_slices": (1, 4)}, False, True),
        (small_cluster(), {}, True, True),
        (ON_CPUS, {}, False, True),
    ],
)
def test_interleaved_token_slices_are_tried_where_trials_flags_or_cpus_have_them(
    cluster: Cluster, constraints: dict[str, tuple], trials_have_it: bool, is_tried: bool
) -> None:
    problem = small_problem(cluster, num_layers=12)
    calibration = no_calibration().model_copy(update={"interleaves_token_slices": trials_have_it})
    costs = replace(question(problem).costs, calibration=calibration)
    problem = costs.problem_with(problem, constraints)
    asked = Question(problem=problem, constraints=constraints, costs=costs)
    choices = asked.choices
    pairs = set()
    for legal in legal_grids(problem, choices, SearchCounts()):
        for order, _, _, count, *_ in np.argwhere(legal.legal):
            pairs.add((*legal.grid.order[order], legal.grid.token_slices[count]))
    for name in ("interleaved", "breadth-first"):
        counts = [count for schedule, model_chunks, count in pairs if schedule == name and model_chunks > 1]
        assert counts or name not in choices["schedule"]
        assert (max(counts, default=1) > 1) == (is_tried and bool(counts))


def crowded(memory_bytes: float, headroom: float) -> SearchProblem:
    (node,) = small_cluster(num_nodes=1, num_devices=4).nodes
    device = replace(node.device, memory_bytes=memory_bytes)
    problem = small_problem(Cluster(nodes=(replace(node, device=device),)), num_layers=10)
    return replace(problem, memory_headroom=headroom)


def share_left(problem: SearchProblem, entry: Ranked) -> float:
    return 1 - entry.prediction.peak_memory_bytes / problem.cluster.nodes[0].device.memory_bytes


def test_every_ranked_strategy_leaves_the_headroom_free_and_the_fastest_other_is_named() -> None:
    plain = crowded(5.9e9, 0.0)
    enough = search(plain, few(plain), pricing_on(plain), top=1)
    assert enough.too_full is None and enough.counts.rejected[HEADROOM] == 0
    left = share_left(plain, enough.entries[0])
    asked = replace(plain, memory_headroom=left + 0.02)
    result = search(asked, few(asked), pricing_on(asked), top=30, effort=3)
    assert result.entries
    assert all(share_left(asked, entry) >= asked.memory_headroom for entry in result.entries)
    # The rule has its own count, and every strategy is counted once.
    assert result.counts.rejected[HEADROOM] > 0
    full, winner = result.too_full, result.entries[0]
    assert full is not None and share_left(asked, full) < asked.memory_headroom
    assert full.prediction.iteration_time_s < winner.prediction.iteration_time_s


def answer(cluster: Cluster) -> SearchResult:
    problem = small_problem(cluster, hidden_size=2048)
    constraints = dict.fromkeys(("num_token_slices", "micro_batch_size", "num_model_chunks"), (1, 2))
    choices = all_choices(problem).constrained({**constraints, "recompute": ("none",)})
    return search(problem, choices, pricing_on(problem), top=3, refine=False)


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
