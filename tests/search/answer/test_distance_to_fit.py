"""The strategy nearest to fitting is the leanest there is, and every remedy works."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.what_if import distance_to_fit, nearest_to_fitting
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.space import LONG_SEQUENCE, SearchProblem, all_choices
from megatron_terapipe.strategy import Strategy
from tests.search.problems import FAST, legal_strategies, question, small_cluster, small_problem

FEW = {"num_token_slices": (1, 2), "stage_partition": ("uniform",), "num_model_chunks": (1, 2)}


def short(memory_bytes: float, **model: int) -> SearchProblem:
    return small_problem(small_cluster(device=replace(FAST, memory_bytes=memory_bytes)), num_layers=8, **model)


def test_nearest_strategy_needs_the_least_memory() -> None:
    problem = short(3e9)
    nearest = nearest_to_fitting(question(problem, FEW))
    pricing = Pricing(problem.workload, problem.cluster)
    least = min(
        max(rank.total for rank in pricing.memory_model.predict(strategy))
        for strategy in legal_strategies(problem, all_choices(problem).constrained(FEW))
    )
    assert nearest is not None and nearest.memory["total"] == pytest.approx(least)
    assert nearest.usable_bytes == pytest.approx(0.95 * 3e9)
    # The memory of a device decides whether the rest fits without the optimizer state.
    bytes_left = nearest.memory["total"] - nearest.memory["optimizer"]
    for factor, fits in ((1.001, True), (0.999, False)):
        found = nearest_to_fitting(question(short(factor * bytes_left / 0.95), FEW))
        assert found is not None and found.fits_with_optimizer_on_host == fits


def test_every_remedy_makes_it_fit() -> None:
    constraints = {**FEW, "recompute": ("none",), "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)}
    problem = short(5.6e9, seq_length=2048)
    distance = distance_to_fit(question(problem, constraints))
    assert distance is not None and distance.memory["total"] > distance.usable_bytes
    kinds = {(each.kind, each.value) for each in distance.remedies}
    assert ("constraint", "tensor_parallel_size") in kinds and "seq_length" in {kind for kind, _ in kinds}
    for kind, value in sorted(kinds, key=str):
        changed, left = problem, constraints
        if kind == "constraint":
            left = {name: values for name, values in constraints.items() if value and name != value}
        elif kind == "devices":
            nodes = problem.cluster.nodes * (int(value) // problem.cluster.num_devices)
            changed = replace(problem, cluster=Cluster(nodes=nodes))
        elif kind == "seq_length":
            assert problem.workload.config is not None
            shorter = gpt_workload(replace(problem.workload.config, seq_length=int(value)))
            changed = replace(problem, workload=shorter)
        else:
            changed = replace(problem, global_batch_size=int(value))
        assert question(changed, left).search().entries, kind


def test_rounded_gradients_of_keys_are_proposed_where_they_decide() -> None:
    constraints: dict[str, tuple[object, ...]] = {
        "num_token_slices": (4,), "stage_partition": ("uniform",), "num_model_chunks": (1,), "offload": (False,),
        "pipeline_parallel_size": (2,), "sequence_parallel_size": (1,),
    }  # fmt: skip
    asked = short(1e9, seq_length=LONG_SEQUENCE)
    needed = [
        found.device_bytes
        for kept in ("fp32", "bf16")
        if (found := nearest_to_fitting(question(asked, {**constraints, "key_value_gradients": (kept,)}))) is not None
    ]
    assert needed[1] < 0.99 * needed[0]
    problem = short(sum(needed) / 2, seq_length=LONG_SEQUENCE)
    distance = distance_to_fit(question(problem, constraints))
    assert distance is not None and distance.memory["total"] > distance.usable_bytes
    (remedy,) = (each for each in distance.remedies if each.kind == "key_value_gradients")
    strategy = Strategy.from_json(remedy.strategy)
    assert strategy.key_value_gradients == remedy.value == "bf16"
    held = Pricing(problem.workload, problem.cluster).memory(strategy)
    assert max(rank.total for rank in held) <= distance.usable_bytes
    too_small = distance_to_fit(question(short(0.99 * needed[1], seq_length=LONG_SEQUENCE), constraints))
    assert too_small is not None and "key_value_gradients" not in {each.kind for each in too_small.remedies}


def test_stages_that_are_computed_again_may_be_nearest() -> None:
    problem = short(1e9, seq_length=LONG_SEQUENCE)
    constraints = {"num_token_slices": (16,), "num_model_chunks": (1,), "stage_partition": ("uniform",)}
    nearest = nearest_to_fitting(question(problem, constraints))
    layers = nearest_to_fitting(question(problem, {**constraints, "recompute": ("full",)}))
    stages = nearest_to_fitting(question(problem, {**constraints, "recompute": ("stage",)}))
    assert nearest is not None and layers is not None and stages is not None
    assert nearest.fullness == min(layers.fullness, stages.fullness) == stages.fullness < layers.fullness


def test_no_distance_where_other_rules_are_broken() -> None:
    assert distance_to_fit(question(short(3e9), {"tensor_parallel_size": (3,)})) is None
