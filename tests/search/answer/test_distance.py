"""Where nothing fits: the strategy that is nearest to fitting, and the changes with which one fits."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.answer.what_if import if_nothing_fits, nearest_to_fitting
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.space import LONG_SEQUENCE, SearchProblem
from tests.search.problems import FAST, legal_strategies, question, small_cluster, small_problem

FEW = {"num_token_slices": (1, 2), "stage_partition": ("uniform",), "num_model_chunks": (1, 2)}


def short(memory_bytes: float, **model: int) -> SearchProblem:
    return small_problem(small_cluster(device=replace(FAST, memory_bytes=memory_bytes)), num_layers=8, **model)


def needed(asked: Question) -> float:
    """Bytes that the nearest strategy needs of a device."""
    times, nearest = nearest_to_fitting(asked)
    assert nearest is not None
    needed = max(rank.total for rank in nearest.price.memory)
    assert needed == pytest.approx(0.95 * times * asked.problem.cluster.nodes[0].device.memory_bytes)
    return needed


def test_nearest_strategy_needs_the_least_memory() -> None:
    asked = question(short(3e9), FEW)
    least = min(
        max(rank.total for rank in asked.pricing.memory_model.predict(strategy))
        for strategy in legal_strategies(asked.problem, asked.choices)
    )
    assert needed(asked) == pytest.approx(least)
    # No distance where other rules are broken.
    assert nearest_to_fitting(question(short(3e9), {"tensor_parallel_size": (3,)}))[1] is None


def test_every_change_makes_it_fit() -> None:
    constraints = {**FEW, "recompute": ("none",), "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)}
    asked = question(short(5.6e9, seq_length=2048), constraints)
    found = [each for each in if_nothing_fits(asked, asked.search()) if each.name not in ("nearest", "device_memory")]
    kinds = {(each.name, each.value) for each in found}
    assert ("constraint", "tensor_parallel_size") in kinds and ("constraint", "") not in kinds
    assert "seq_length" in {kind for kind, _ in kinds}
    problem, config = asked.problem, asked.problem.workload.config
    for kind, value in kinds:
        if kind == "constraint":
            changed = asked.changed({name: each for name, each in constraints.items() if name != value})
        elif kind == "devices":
            nodes = problem.cluster.nodes * (int(value) // problem.cluster.num_devices)
            changed = asked.changed(cluster=Cluster(nodes=nodes))
        elif kind == "seq_length":
            changed = asked.changed(workload=gpt_workload(replace(config, seq_length=int(value))))  # type: ignore[type-var]
        else:
            changed = asked.changed(global_batch_size=int(value))
        (best,) = changed.search().entries
        assert [best.iteration_time_s] == [each.iteration_time_s for each in found if each.value == value], kind


def test_rounded_gradients_of_keys_are_proposed_where_they_decide() -> None:
    constraints: dict[str, tuple[object, ...]] = {
        "num_token_slices": (4,), "stage_partition": ("uniform",), "num_model_chunks": (1,), "offload": (False,),
        "pipeline_parallel_size": (2,), "sequence_parallel_size": (1,),
    }  # fmt: skip
    asked = short(1e9, seq_length=LONG_SEQUENCE)
    whole, rounded = (
        needed(question(asked, {**constraints, "key_value_gradients": (kept,)})) / 0.95 for kept in ("fp32", "bf16")
    )
    assert rounded < 0.99 * whole
    between = question(short((whole + rounded) / 2, seq_length=LONG_SEQUENCE), constraints)
    assert nearest_to_fitting(between)[0] > 1
    parts = if_nothing_fits(between, between.search())
    (strategy,) = (each.strategy for each in parts if each.name == "key_value_gradients")
    assert strategy.key_value_gradients == "bf16"
    held = between.pricing.memory(strategy)
    assert max(rank.total for rank in held) <= 0.95 * (whole + rounded) / 2
    too_small = question(short(0.99 * rounded, seq_length=LONG_SEQUENCE), constraints)
    assert "key_value_gradients" not in {each.name for each in if_nothing_fits(too_small, too_small.search())}


def test_stages_that_are_computed_again_may_be_nearest() -> None:
    problem = short(1e9, seq_length=LONG_SEQUENCE)
    constraints = {"num_token_slices": (16,), "num_model_chunks": (1,), "stage_partition": ("uniform",)}
    nearest, layers, stages = (
        nearest_to_fitting(question(problem, constraints | more))[0]
        for more in ({}, {"recompute": ("full",)}, {"recompute": ("stage",)})
    )
    assert nearest == stages < layers


def test_lines_of_missing_memory() -> None:
    asked = question(small_problem(small_cluster(device=replace(FAST, memory_bytes=1e9))))
    nearest, *changes, last = if_nothing_fits(asked, asked.search())
    assert nearest.name == "nearest" and " of a device, and fast has 950 MB (5% kept free)" in nearest.line
    assert "framework 3.5 GB" in nearest.more
    assert last.name == "device_memory" and last.line.startswith("devices of ")
    assert not changes, "the framework alone is more than such a device has"
