"""ZeRO 3 with Ulysses: its settings, its seconds, and its prices compared with published runs.

Runs are lines of `published_long_sequences.jsonl`, with their sources; `checked`: whether the source was read; else
the figure is from memory. A GB of a recipe's comment is 2^30 bytes, as DeepSpeed prints it. One constant is fitted to
them: bytes of the host for a parameter.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.search.answer.other_trainers import (
    Rival,
    all_strategies,
    best_rival,
    has_rival,
    mlp_of,
    rival_memory,
    rival_time,
    why_none,
)
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.machine.trainers import ALST
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.memory import default_overheads
from megatron_terapipe.search.price.workload import Workload, gpt_workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.grid_prices import FITS
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from tests.model.configs import model_config
from tests.search.problems import small_cluster, small_problem

LINES = Path(__file__).parent.joinpath("published_long_sequences.jsonl").read_text(encoding="utf-8").splitlines()
RUNS: dict[str, dict[str, Any]] = {line["id"]: line for line in map(json.loads, LINES)}
ONE = Strategy(recompute="full", zero_stage=3)
ALL = ("checkpoints", "optimizer", "weights")


def with_measured(name: str) -> list[str]:
    """The names of the runs that measured something."""
    return [each for each, run in RUNS.items() if name in run["measured"]]


def workload_of(name: str) -> Workload:
    return read_workload(RUNS[name]["model"], {"seq_length": RUNS[name]["seq_length"]})


def cluster_of(name: str) -> Cluster:
    return parse_cluster(RUNS[name]["cluster"], name)[0]


def settings_of(name: str) -> tuple[Strategy, tuple[str, ...]]:
    on_host = tuple(each for each in ALL if RUNS[name][f"offloads_{each}"])
    return replace(ONE, sequence_parallel_size=RUNS[name]["sequence_parallel_size"]), on_host


def memory_of(name: str, seq_length: int | None = None) -> tuple[float, float]:
    """The predicted bytes of a device and of a host, with a sequence of another length."""
    workload, cluster, (strategy, on_host) = workload_of(name), cluster_of(name), settings_of(name)
    if seq_length is not None:
        layers = tuple(replace(layer, tokens=seq_length) for layer in workload.layers)
        workload = replace(workload, layers=layers, seq_length=seq_length)
    ranks = min(max(node.num_devices for node in cluster.nodes), strategy.world_size)
    memory, host = rival_memory(workload, strategy, on_host, default_overheads(cluster, ALST), ranks)
    return memory.total, host


def fits(name: str, seq_length: int | None = None) -> bool:
    (device, host), cluster = memory_of(name, seq_length), cluster_of(name)
    usable = default_overheads(cluster, ALST).usable_share * min(node.device.memory_bytes for node in cluster.nodes)
    return device <= usable and host <= min(node.host.memory_bytes for node in cluster.nodes)


@pytest.mark.parametrize("name", RUNS)
def test_a_published_run_is_predicted_to_fit(name: str) -> None:
    assert fits(name)


@pytest.mark.parametrize("name", with_measured("longest"))
def test_longest_sequences_are_at_most_a_quarter_longer(name: str) -> None:
    fitting, too_long = 1024, 2**30
    while too_long > 1.01 * fitting:
        middle = (fitting + too_long) // 2
        fitting, too_long = (middle, too_long) if fits(name, middle) else (fitting, middle)
    assert 1 <= fitting / RUNS[name]["seq_length"] <= 1.25


@pytest.mark.parametrize("name", with_measured("device_gib"))
def test_memory_of_devices(name: str) -> None:
    assert memory_of(name)[0] == pytest.approx(RUNS[name]["measured"]["device_gib"] * 2**30, rel=0.05)


@pytest.mark.parametrize("name", with_measured("iteration_time_s"))
def test_times(name: str) -> None:
    predicted = rival_time(of_alst(workload_of(name), cluster_of(name)), *settings_of(name)).iteration_time_s
    assert predicted == pytest.approx(RUNS[name]["measured"]["iteration_time_s"], rel=0.15)


def of_alst(workload: Workload, cluster: Cluster) -> CostModel:
    return CostModel(workload, cluster, software=ALST)


def h100(nodes: int, **host: str) -> Cluster:
    return parse_cluster({"nodes": [{"machine": "dgx-h100", "count": nodes, "host": host}]}, "c.json")[0]


def best(model: str, seq_length: int, nodes: int, **host: str) -> Rival:
    workload = read_workload(model, {"seq_length": seq_length})
    found = best_rival(Pricing(workload, h100(nodes, **host), software=ALST), 1)
    assert found is not None
    return found


def test_ranks_divide_heads_tokens_and_the_batch() -> None:
    workload = read_workload("llama3-8b", {"seq_length": 131072})
    tried = list(all_strategies(workload, 256, 4))
    # 32 heads, 4 sequences: 128 of 256 devices, and no fewer.
    assert {(each.sequence_parallel_size, each.data_parallel_size) for each in tried} == {(32, 4)}
    assert {each.num_sequences for each in tried} == {4}
    assert {each.sequence_parallel_size for each in all_strategies(workload, 24, 24)} == {1, 2, 4, 8}


def test_free_memory_is_used_before_the_host_and_else_the_nearest_to_fitting_is_chosen() -> None:
    assert best("llama3-8b", 131072, 1).on_host == ()
    long = best("llama3-8b", 2_000_000, 1)
    assert not long.lacking and "checkpoints" in long.on_host
    full = best("llama3-70b", 1_048_576, 1, memory="500 GB")
    assert full.lacking and full.prediction.iteration_time_s > 0


@pytest.mark.parametrize(
    ("length", "precision", "priced"), [(16384, "bf16", 0), (32768, "bf16", 1), (32768, "fp16", 0)]
)
def test_only_long_sequences_in_bf16_have_a_rival(length: int, precision: str, priced: bool) -> None:
    workload = read_workload("llama3-8b", {"seq_length": length})
    problem = SearchProblem(workload=workload, cluster=h100(1), global_batch_size=1, precision=precision)
    assert has_rival(problem) == priced


@pytest.fixture(scope="module")
def model() -> CostModel:
    return of_alst(small_problem(seq_length=65536, hidden_size=1024).workload, small_cluster(2, num_devices=4))


def test_an_mlp_is_priced_without_the_mixer_before_it() -> None:
    linear = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"}
    layers = gpt_workload(model_config(num_layers=2, **linear)).layers[1:3]
    assert layers[0].recurrence is not None and layers[1].attention is not None
    first, second = (mlp_of(layer) for layer in layers)
    assert (first.products, first.recurrence, first.attention) == (second.products, None, None)
    assert len(first.products) == 2


def test_ranks_divide_the_work(model: CostModel) -> None:
    alone, four, shared = (rival_time(model, replace(ONE, sequence_parallel_size=ranks)) for ranks in (1, 4, 8))
    assert alone.breakdown.head_exchange_s == 0 < shared.breakdown.head_exchange_s
    # Gradients of weights are added up on every rank, whatever its tokens.
    assert alone.breakdown.compute_s / 8 < shared.breakdown.compute_s < 1.2 * alone.breakdown.compute_s / 8
    # Half of the bytes of four ranks leave over one card; inside, three quarters of those of one rank over its link.
    assert shared.breakdown.head_exchange_s > 4 * four.breakdown.head_exchange_s
    # MLPs run forward once more than layers that are recomputed.
    without = model.predict_time(replace(ONE, sequence_parallel_size=4)).breakdown.compute_s
    assert without < four.breakdown.compute_s < 1.25 * without


def test_copies_to_the_host_take_time(model: CostModel) -> None:
    strategy = replace(ONE, sequence_parallel_size=4)
    kept, offloaded = (rival_time(model, strategy, on_host).breakdown for on_host in ((), ALL))
    assert kept.host_copy_s == 0 < offloaded.host_copy_s
    assert kept.optimizer_s < offloaded.optimizer_s and kept.compute_s == offloaded.compute_s


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(FITS, "no strategy of it fits the memory"), ("other", "the last of its strategies break the rule 'other'")],
)
def test_why_another_trainer_cannot_run_it(broken: str, reason: str) -> None:
    assert why_none(broken) == reason
