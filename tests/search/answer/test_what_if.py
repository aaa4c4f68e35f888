"""The same question with one change: orders that are found, fewer devices, less headroom; and the lines that say so."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.search.answer.figures import NOT_ASKED, Training
from megatron_terapipe.search.answer.json_documents import WhatIfPart
from megatron_terapipe.search.answer.output_files import write_files
from megatron_terapipe.search.answer.what_if import (
    FOUND_ORDER,
    at_published_mfu,
    best_on_parts,
    on_fewer_devices,
    sizes_of_parts,
    what_ifs,
    with_found_order,
    with_less_headroom,
)
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.machine.trainers import DEEPSPEED
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from tests.search.answer import answers
from tests.search.price.machines import gpt
from tests.search.problems import FAST, SLOW, node, question, small_cluster, small_problem

LARGE_VOCABULARY = gpt(8, 1024, 8, 2048, 64_000, untie_embeddings_and_output_weights=True)
PIPELINE = Strategy(pipeline_parallel_size=4, num_token_slices=4, global_batch_size=8)


def only(found: Iterator[WhatIfPart]) -> WhatIfPart | None:
    parts = list(found)
    assert len(parts) < 2
    return parts[0] if parts else None


def found_for(
    model: ModelConfig = LARGE_VOCABULARY, strategy: Strategy = PIPELINE, **constraints: tuple[object, ...]
) -> tuple[WhatIfPart | None, Ranked, SearchProblem]:
    cluster = small_cluster(num_nodes=1, num_devices=4)
    asked = question(SearchProblem(workload=gpt_workload(model), cluster=cluster, global_batch_size=8), constraints)
    winner = Ranked(strategy=strategy, prediction=asked.pricing.predict(strategy))
    return only(with_found_order(asked, winner)), winner, asked.problem


def test_a_large_output_layer_is_cut_into_vocabulary_stages_at_the_price_that_they_have() -> None:
    found, winner, problem = found_for()
    assert found is not None
    strategy = found.strategy
    assert strategy == replace(PIPELINE, schedule=OPTIMISED, vocabulary_stages=True)
    price = Pricing(problem.workload, problem.cluster).predict(strategy)
    assert found.iteration_time_s == price.iteration_time_s < 0.95 * winner.iteration_time_s
    assert found.change == pytest.approx(1 - price.iteration_time_s / winner.iteration_time_s)
    assert f", {found.change:.0%} less: --output DIR adds DIR/{FOUND_ORDER}" in found.line
    assert "--pipeline-schedule optimised --vocabulary-stages;" in found.more


@pytest.mark.parametrize(
    "changes", [{"untie_embeddings_and_output_weights": False}, {"make_vocab_size_divisible_by": 2}]
)
def test_output_layer_stays_whole_where_it_cannot_be_cut(changes: dict[str, int]) -> None:
    found, _, _ = found_for(replace(LARGE_VOCABULARY, **changes))  # type: ignore[arg-type]
    assert found is None or not found.strategy.vocabulary_stages


def test_stages_that_flags_fix_stay_and_fixed_schedules_or_full_devices_have_no_found_order() -> None:
    bounds = (0, 2, 4, 6, 8)
    found, winner, problem = found_for(strategy=replace(PIPELINE, stage_partition=bounds), stage_partition=(bounds,))
    assert found is not None and found.strategy.stage_partition == bounds
    assert found_for(schedule=("1f1b",))[0] is None
    assert found_for(strategy=replace(PIPELINE, num_token_slices=64, global_batch_size=64))[0] is None
    for changes in ({"software": DEEPSPEED}, {"memory_headroom": 0.999}):
        assert not list(with_found_order(question(problem).changed(**changes), winner))


def test_a_found_order_has_files(tmp_path: Path) -> None:
    order = replace(answers.BEST, schedule=OPTIMISED)
    part = WhatIfPart(
        name="found_order", value=None, strategy=order, iteration_time_s=1.0, change=0.2, line="found", more=""
    )
    document, asked = answers.answer(advice=[part]), answers.small_problem()
    costs = Pricing(asked.workload, asked.cluster).cost_model.pipeline_costs
    written = write_files(document, asked, costs, directory=str(tmp_path), html=None).launch
    folder = tmp_path / FOUND_ORDER
    assert {str(folder / name) for name in ("strategy.json", "cluster.json", "launch.sh")} <= set(written.files)
    assert Strategy.from_json(json.loads((folder / "strategy.json").read_text())).schedule == OPTIMISED


SLOWER = replace(SLOW, name="slower", half_flops=50e12)
MIXED = Cluster(nodes=(node("a", SLOW), node("b", SLOWER), node("c", FAST), node("d", FAST)))


def test_parts_of_a_cluster_have_whole_nodes() -> None:
    assert sizes_of_parts(MIXED) == [6, 4, 2]
    named = {size: [each.name for each in MIXED.at_most(size).nodes] for size in (100, 6, 5, 4, 2)}
    assert named == {100: [*"abcd"], 6: [*"acd"], 5: [*"cd"], 4: [*"cd"], 2: ["c"]}
    (alone,) = MIXED.at_most(1).nodes
    assert alone.name == "c" and alone.num_devices == 1
    # Numbers of nodes that divide all of them, or are powers of two.
    assert sizes_of_parts(small_cluster(num_nodes=12)) == [12, 6, 2]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=8)) == [4, 2, 1]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=1)) == []


CONSTRAINTS = {"schedule": ("1f1b",), "num_token_slices": (1,), "recompute": ("none",), "num_model_chunks": (1,)}
USELESS = replace(SLOW, half_flops=2e12, memory_bandwidth=20e9)
PRICED = Training(prices={"fast": 1.0, "slow": 3.0})


@pytest.mark.parametrize(
    ("devices", "network", "training", "line"),
    [
        ((FAST, USELESS), 0.05e9, NOT_ASKED, "2 of 4 devices: "),
        ((FAST, USELESS), 0.05e9, PRICED, " of the price: --devices-at-most 2"),
        ((FAST, replace(FAST, name="other")), 400e9, NOT_ASKED, None),
        ((FAST,) * 4, 0.02e9, NOT_ASKED, "2 of 8 devices: "),
        ((FAST,) * 4, 400e9, NOT_ASKED, " fewer device hours: --devices-at-most 4"),
    ],
)
def test_slow_devices_and_slow_links_are_left_out(
    devices: tuple, network: float, training: Training, line: str | None
) -> None:
    cluster = Cluster(nodes=tuple(node(f"host{at}", each, network=network) for at, each in enumerate(devices)))
    problem = small_problem(cluster, global_batch_size=64)
    asked = question(problem, CONSTRAINTS)
    winner = asked.search(effort=1.0).entries[0]
    for part, entry in best_on_parts(asked, winner):
        # It is a strategy for the part, at the price that it has there.
        assert entry.strategy.world_size == part.num_devices
        price = Pricing(problem.workload, part).predict(entry.strategy)
        assert price.iteration_time_s == pytest.approx(entry.iteration_time_s)
    found = only(on_fewer_devices(asked, winner, training=training))
    assert (found is None) == (line is None)
    if found is not None and line is not None:
        assert line in found.line and found.line.endswith(f": --devices-at-most {found.value}")
        assert found.strategy.world_size == found.value


def test_devices_that_are_left_out_to_save_device_hours() -> None:
    """On half of the devices most of the time is that of the network between them: it takes longer, for less."""
    cluster = Cluster(nodes=(node("a"), node("b", SLOW)))
    asked = question(small_problem(cluster, global_batch_size=64), CONSTRAINTS)
    winner = asked.search(effort=1.0).entries[0]
    slower = replace(winner, prediction=replace(winner.price, iteration_time_s=0.0))
    ((part, entry),) = best_on_parts(asked, winner)
    said = {}
    for ratio in (1.1, 1.9):
        price = replace(slower.price, iteration_time_s=entry.iteration_time_s / ratio)
        said[ratio] = only(on_fewer_devices(asked, replace(winner, prediction=price)))
    assert part.num_devices == 2 and said[1.9] is None and said[1.1] is not None
    assert ", 1.10 times rank 1, for 45% fewer device hours: " in said[1.1].line
    assert said[1.1].change == pytest.approx(0.45) and said[1.1].more.startswith("They are fast. ")


@pytest.mark.parametrize(("saves", "said"), [(0.03, True), (0.004, False)])
def test_less_headroom_is_said_where_it_saves_time(saves: float, said: bool) -> None:
    asked = question(small_problem(global_batch_size=8))
    full = Ranked(strategy=Strategy(data_parallel_size=4, global_batch_size=8), prediction=None)
    full = replace(full, prediction=asked.pricing.predict(full.strategy))
    slower = replace(full.price, iteration_time_s=full.iteration_time_s / (1 - saves))
    found = only(with_less_headroom(asked, full, replace(full, prediction=slower)))
    assert (found is not None) == said
    if found is not None:
        peak = max(rank.total for rank in full.price.memory) / asked.problem.cluster.nodes[0].device.memory_bytes
        assert found.value == pytest.approx(1 - peak, abs=1e-3) and f"--memory-headroom {found.value:g}" in found.line


def test_a_longer_search_is_named_where_it_could_save_time() -> None:
    asked = question(small_problem(global_batch_size=8))
    result = asked.search(effort=1.0)
    said = {
        saves: [each.line for each in what_ifs(asked, replace(result, could_save=saves)) if each.name == "effort"]
        for saves in (0.004, 0.112)
    }
    assert said == {
        0.004: [],
        0.112: ["a strategy that was not simulated could be 11.2% faster at most: more --effort finds it"],
    }


ONE_NODE = parse_cluster({"nodes": [{"device": "A100-80GB", "devices": 8}]}, "cluster")[0]


@pytest.mark.parametrize(
    ("seq_length", "speed_up", "said"),
    [
        (2048, 1.0, False),
        (2048, 3.0, True),
        # Only the count differs, which has scores that are never computed.
        (131_072, 1.0, False),
    ],
)
def test_an_mfu_above_all_published_ones_is_doubted(seq_length: int, speed_up: float, said: bool) -> None:
    workload = read_workload("gpt3-6.7b", {"seq_length": seq_length})
    strategy = Strategy(tensor_parallel_size=8, micro_batch_size=4, global_batch_size=64)
    price = Pricing(workload, ONE_NODE).predict(strategy)
    entry = Ranked(strategy=strategy, prediction=replace(price, iteration_time_s=price.iteration_time_s / speed_up))
    found = only(at_published_mfu(SearchProblem(workload=workload, cluster=ONE_NODE, global_batch_size=64), entry))
    assert (found is not None) == said
    if found is not None:
        assert found.value == 0.705 and found.iteration_time_s is not None
        assert found.iteration_time_s > entry.iteration_time_s and "was never published; at the best, 70%" in found.line
