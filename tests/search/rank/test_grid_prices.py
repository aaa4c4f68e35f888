"""Bounds in closed form never exceed the simulated time and memory of a strategy, and are close to them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.stages import LayerCounts
from megatron_terapipe.search.rank.grid_prices import COARSE_SUMS, _ranks_to_look_at, live_token_slices, price_space
from megatron_terapipe.search.rank.node_orders import node_orders
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from tests.search.problems import mixed_cluster, node, small_cluster, small_problem

CLUSTERS = {
    "uniform": small_cluster(num_nodes=2, num_devices=4),
    "mixed": mixed_cluster(),
    "slow network": Cluster(nodes=tuple(node(f"host{index}", num_devices=1, network=2e8) for index in range(4))),
}
CLUSTERS["small hosts"] = Cluster(
    nodes=tuple(replace(each, host=replace(each.host, memory_bytes=5e7)) for each in CLUSTERS["slow network"].nodes)
)


LONG = {
    "sequence_parallel_size": (1, 4),
    "recompute": ("none", "stage"),
    "offload": (False, True),
    "schedule": ("1f1b", "interleaved", "zero-bubble", "breadth-first"),
    "num_token_slices": (1, 3),
    "num_model_chunks": (1, 2),
    "micro_batch_size": (1, 2),
    "key_value_gradients": ("bf16",),
}
"""Values for long sequences."""
WAITING = {**LONG, "recompute": ("stage",), "offload": (True,)}
"""The same, with token slices on hosts."""


def coarse(problem: SearchProblem, **others: Any) -> Choices:
    return all_choices(problem).constrained(
        {"num_token_slices": (1, 2, 3, 8), "micro_batch_size": (1, 2, 4), "num_model_chunks": (1, 2, 3), **others}
    )


FEATURES = {"sliding_window": 100, "window_attn_skip_freq": "2", "attention_softcap": 30.0, "qk_norm": "head"}
"""Layers of two kinds, and attention that is written out."""

EXPERTS = {
    **{"num_experts": 8, "moe_ffn_hidden_size": 512, "moe_layer_freq": "2", "moe_shared_expert_intermediate_size": 256},
    **{"activation": "swiglu", "disable_bias_linear": True},
}
LATENT = {
    **{"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_head_dim": 24},
    **{"qk_pos_emb_head_dim": 8, "v_head_dim": 24, "qk_norm": "head"},
}
FEW = {"num_token_slices": (1, 3), "num_model_chunks": (1, 2), "stage_partition": ("uniform",)}


@pytest.mark.parametrize(
    ("name", "features", "others"),
    [
        *((name, {}, {}) for name in CLUSTERS),
        ("uniform", FEATURES, {}),
        ("slow network", {}, LONG),
        ("small hosts", {}, WAITING),
        ("uniform", FEATURES, LONG),
        ("uniform", EXPERTS, FEW),
        ("uniform", LATENT, FEW),
    ],
)
def test_bounds_of_time_and_memory(name: str, features: dict[str, Any], others: dict[str, Any]) -> None:
    problem = small_problem(CLUSTERS[name], global_batch_size=16, num_layers=13, **features)
    efficiency = HardwareEfficiency(op_s=1e-4)
    pricings = [Pricing(problem.workload, order, efficiency=efficiency) for order in node_orders(problem.cluster)]
    rng = np.random.default_rng(0)
    ratios, estimates = [], []
    for grid in price_space(problem, coarse(problem, **others), pricings, SearchCounts()):
        for index in rng.choice(len(grid.places), size=min(6, len(grid.places)), replace=False).tolist():
            strategy = grid.strategy(index, problem)
            pricing = pricings[grid.node_order]
            predicted, smallest = pricing.predict(strategy), pricing.cost_model.groups(strategy).smallest
            simulated = predicted.iteration_time_s
            full = max(rank.total / one.memory_bytes for rank, one in zip(predicted.memory, smallest, strict=True))
            # Token slices of unequal lengths count as equal ones.
            assert grid.fullness[index] <= full * 1.002, strategy
            assert grid.bound[index] <= simulated * (1 + 1e-9), strategy
            ratios.append(grid.bound[index] / simulated)
            estimates.append(grid.estimate[index] / simulated)
    assert len(ratios) > 20
    assert np.median(ratios) > 0.9
    assert 0.9 < np.median(estimates) < 1.1


@pytest.mark.parametrize(
    ("features", "others"),
    [({}, {}), (FEATURES, {}), (FEATURES, LONG), (EXPERTS, FEW)],
    ids=["plain", "windows", "long", "experts"],
)
def test_strategies_rejected_for_memory_do_not_fit(features: dict[str, Any], others: dict[str, Any]) -> None:
    cluster = small_cluster(num_nodes=1, num_devices=4)
    (node,) = cluster.nodes
    small = replace(node, device=replace(node.device, memory_bytes=5.2e9))
    problem = small_problem(Cluster(nodes=(small,)), global_batch_size=16, num_layers=13, seq_length=1024, **features)
    pricing = Pricing(problem.workload, problem.cluster)
    roomy = Pricing(problem.workload, cluster)
    choices = coarse(problem, **others)
    fitting = {
        grid.strategy(index, problem)
        for grid in price_space(problem, choices, [pricing], SearchCounts())
        for index in range(len(grid.places))
    }
    everything = [
        grid.strategy(index, problem)
        for grid in price_space(problem, choices, [roomy], SearchCounts())
        for index in range(0, len(grid.places), 2 if others else 23)
    ]
    rejected, wrong = 0, 0
    for strategy in everything:
        memory = pricing.memory(strategy)
        fits = pricing.why_it_does_not_fit(strategy, memory) is None
        assert strategy in fitting or not fits, strategy
        rejected += strategy not in fitting
        wrong += strategy in fitting and not fits
    # The bound rejects most of those that do not fit.
    assert rejected > 20 and wrong < rejected / 4, (rejected, wrong, len(everything))


@pytest.mark.parametrize(
    ("parameters", "experts", "layers", "ranks"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], [2, 2, 2, 2], [0, 3]),
        ([1, 3, 1, 1, 1], [0, 0, 0, 0, 0], [2, 2, 3, 2, 2], [0, 1, 2, 4]),
        ([3, 2, 2, 2], [0, 0, 9, 5], [2, 2, 2, 1], [0, 2, 3]),  # experts after dense layers
        ([3, 2, 2, 2, 2], [0, 9, 9, 9, 5], [2, 2, 2, 2, 1], [0, 1, 3, 4]),
    ],
)
def test_the_fullest_rank_is_among_those_that_are_counted(
    parameters: list[int], experts: list[int], layers: list[int], ranks: list[int]
) -> None:
    held = [np.array(each, dtype=float) for each in (parameters, experts)]
    counts = LayerCounts(np.array(layers, dtype=float)[:, None], held[0], held[0], np.arange(3), held[1])
    assert _ranks_to_look_at(counts) == ranks


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved", "gpipe", "breadth-first"])
def test_live_token_slices_are_those_of_the_schedule(schedule: str) -> None:
    from deepspeed_ext.plan.ops import PipelineShape
    from deepspeed_ext.plan.schedules import SCHEDULES
    from deepspeed_ext.plan.simulate.compiled import CompiledOrders

    for ranks, micro_batches, token_slices in ((2, 4, 1), (4, 8, 2), (4, 3, 3), (3, 2, 5)):
        model_chunks = 2 if schedule in ("interleaved", "breadth-first") else 1
        shape = PipelineShape(ranks * model_chunks, micro_batches, token_slices, model_chunks)
        orders = CompiledOrders.of_schedule(SCHEDULES[schedule], shape)
        peaks = np.array(orders.peak_activation()) * token_slices * model_chunks
        for rank in range(ranks):
            live = live_token_slices(
                schedule, ranks, model_chunks, rank, np.array(float(micro_batches)), np.array(float(token_slices))
            )
            assert float(live) <= peaks[rank] + 1e-9
            if rank == 0:
                assert float(live) == pytest.approx(peaks[0])


def test_bf16_gradients_are_added_up_in_fp32() -> None:
    problem = small_problem(small_cluster(num_nodes=2, num_devices=4), global_batch_size=16)
    pricing = Pricing(problem.workload, problem.cluster)
    every = coarse(problem)

    def stages(choices: Choices, precision: str) -> set[int]:
        asked, counts = replace(problem, precision=precision), SearchCounts()
        grids = list(price_space(asked, choices, [pricing], counts))
        assert (counts.rejected[COARSE_SUMS] > 0) == (precision == "bf16" and 1 in choices["zero_stage"])
        return {grid.strategy(index, asked).zero_stage for grid in grids for index in range(0, len(grid.places), 7)}

    assert stages(every, "bf16") == {1}
    assert stages(every, "fp32") == {0, 1}
    assert stages(every.constrained({"zero_stage": (0,)}), "bf16") == {0}
