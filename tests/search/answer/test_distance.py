"""Where nothing fits: the strategy that is nearest to fitting, and the changes with which one fits."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.distance import fitting_changes, if_nothing_fits, nearest_to_fitting
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.space import LONG_SEQUENCE, SearchProblem
from tests.search.problems import FAST, legal_strategies, question, small_cluster, small_problem

FEW = {"num_token_slices": (1, 2), "stage_partition": ("uniform",), "num_model_chunks": (1, 2)}


def short(memory_bytes: float, **model: int) -> SearchProblem:
    return small_problem(small_cluster(device=replace(FAST, memory_bytes=memory_bytes)), num_layers=8, **model)


def test_nearest_strategy_needs_the_least_memory() -> None:
    asked = question(short(3e9), FEW)
    nearest = nearest_to_fitting(asked)
    least = min(
        max(rank.total for rank in asked.pricing.memory_model.predict(strategy))
        for strategy in legal_strategies(asked.problem, asked.choices)
    )
    assert nearest is not None and nearest.memory.total == pytest.approx(least)
    assert nearest.usable_bytes == pytest.approx(0.95 * 3e9)
    # No distance where other rules are broken.
    assert nearest_to_fitting(question(short(3e9), {"tensor_parallel_size": (3,)})) is None


def test_every_change_makes_it_fit() -> None:
    constraints = {**FEW, "recompute": ("none",), "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)}
    asked = question(short(5.6e9, seq_length=2048), constraints)
    kinds = {(name, value) for name, value, *_ in fitting_changes(asked)}
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
        assert changed.search().entries, kind


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
    nearest = nearest_to_fitting(question(problem, constraints))
    assert nearest is not None and nearest.fullness > 1
    (strategy,) = (
        each[3] for each in fitting_changes(question(problem, constraints)) if each[0] == "key_value_gradients"
    )
    assert strategy.key_value_gradients == "bf16"
    held = Pricing(problem.workload, problem.cluster).memory(strategy)
    assert max(rank.total for rank in held) <= nearest.usable_bytes
    too_small = question(short(0.99 * needed[1], seq_length=LONG_SEQUENCE), constraints)
    assert "key_value_gradients" not in {each[0] for each in fitting_changes(too_small)}


def test_stages_that_are_computed_again_may_be_nearest() -> None:
    problem = short(1e9, seq_length=LONG_SEQUENCE)
    constraints = {"num_token_slices": (16,), "num_model_chunks": (1,), "stage_partition": ("uniform",)}
    nearest, layers, stages = (
        found.fullness
        for more in ({}, {"recompute": ("full",)}, {"recompute": ("stage",)})
        if (found := nearest_to_fitting(question(problem, constraints | more))) is not None
    )
    assert nearest == stages < layers


def test_lines_of_missing_memory() -> None:
    asked = question(small_problem(small_cluster(device=replace(FAST, memory_bytes=1e9))))
    nearest, *changes, last = if_nothing_fits(asked, asked.search())
    assert nearest.name == "nearest" and " of a device, and fast has 950 MB (5% kept free)" in nearest.line
    assert "framework 3.5 GB" in nearest.more
    assert last.name == "device_memory" and last.line.startswith("devices of ")
    assert not changes, "the framework alone is more than such a device has"
