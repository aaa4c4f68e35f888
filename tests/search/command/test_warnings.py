"""What is said of a winner that nearly fills its devices, and of machines that slow a mixed cluster down."""

from dataclasses import replace

from megatron_terapipe.search.command.warnings import FULL, fullness, memory_note, parts_of, smaller_cluster_note
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.inputs.cluster import Cluster
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


def test_parts_leave_out_the_slowest_kinds_first() -> None:
    slower = replace(SLOW, name="slower", half_flops=50e12)
    cluster = Cluster(nodes=(node("a", SLOW), node("b", slower), node("c", FAST)))
    assert [[each.name for each in part.nodes] for part in parts_of(cluster)] == [["a", "c"], ["c"]]
    assert parts_of(small_cluster()) == []


def test_a_slow_machine_behind_a_slow_link_is_better_left_out() -> None:
    useless = replace(SLOW, half_flops=2e12, memory_bandwidth=20e9)
    for device, network, said in ((useless, 0.05e9, True), (replace(FAST, name="other"), 400e9, False)):
        cluster = Cluster(nodes=(node("a", FAST, network=network), node("b", device, network=network)))
        problem = small_problem(cluster, global_batch_size=64)

        def pricing_on(part: Cluster, problem: SearchProblem = problem) -> Pricing:
            return Pricing(problem.workload, part)

        winner = search(problem, all_choices(problem).constrained(CONSTRAINTS), pricing_on, top=1).entries[0]
        note = smaller_cluster_note(winner, problem, CONSTRAINTS, pricing_on)
        assert (note is not None) == said, note
        if note is not None:
            assert note.startswith("without the nodes of slow an iteration takes ")
