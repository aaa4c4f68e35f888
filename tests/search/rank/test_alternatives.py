"""The winner with an order that is searched for, and the parts of the cluster that are tried."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.json_documents import AdvicePart
from megatron_terapipe.search.answer.output_files import write_files
from megatron_terapipe.search.answer.what_if import (
    FOUND_ORDER,
    advice_notes,
    alternative_part,
    sizes_of_parts,
    with_found_order,
)
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.trainers import DEEPSPEED
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from tests.search.answer import answers
from tests.search.answer.answers import BEST, answer
from tests.search.price.machines import gpt
from tests.search.problems import FAST, SLOW, node, question, small_cluster

LARGE_VOCABULARY = gpt(8, 1024, 8, 2048, 64_000, untie_embeddings_and_output_weights=True)
TIED = replace(LARGE_VOCABULARY, untie_embeddings_and_output_weights=False)
UNEVEN = replace(LARGE_VOCABULARY, make_vocab_size_divisible_by=2)
STRATEGY = Strategy(pipeline_parallel_size=4, num_token_slices=4, global_batch_size=8)


def found_for(
    model: ModelConfig = LARGE_VOCABULARY, strategy: Strategy = STRATEGY, **constraints: tuple[object, ...]
) -> tuple[Ranked | None, Ranked, SearchProblem]:
    cluster = small_cluster(num_nodes=1, num_devices=4)
    problem = SearchProblem(workload=gpt_workload(model), cluster=cluster, global_batch_size=8)
    asked = question(problem, constraints)
    winner = Ranked(strategy=strategy, prediction=asked.pricing.predict(strategy))
    return with_found_order(asked, winner), winner, problem


def test_a_large_output_layer_is_cut_into_vocabulary_stages_at_the_price_that_they_have() -> None:
    found, winner, problem = found_for()
    assert found is not None and found.prediction is not None and winner.prediction is not None
    assert found.strategy == replace(STRATEGY, schedule=OPTIMISED, vocabulary_stages=True)
    assert found.prediction == Pricing(problem.workload, problem.cluster).predict(found.strategy)
    assert found.prediction.iteration_time_s < 0.95 * winner.prediction.iteration_time_s


@pytest.mark.parametrize("model", [TIED, UNEVEN], ids=["tied to the embedding", "rows that cannot be dealt"])
def test_output_layer_stays_whole_where_it_cannot_be_cut(model: ModelConfig) -> None:
    found, _, _ = found_for(model)
    assert found is None or not found.strategy.vocabulary_stages


def test_stages_that_flags_fix_stay() -> None:
    bounds = (0, 2, 4, 6, 8)
    found, _, _ = found_for(strategy=replace(STRATEGY, stage_partition=bounds), stage_partition=(bounds,))
    assert found is not None and found.strategy.stage_partition == bounds


def test_no_order_is_searched_for_fixed_schedules() -> None:
    assert found_for(schedule=("1f1b",))[0] is None
    assert found_for(strategy=replace(STRATEGY, num_token_slices=64, global_batch_size=64))[0] is None
    _, winner, problem = found_for()
    assert with_found_order(question(replace(problem, software=DEEPSPEED)), winner) is None


def test_orders_without_headroom_are_not_advised() -> None:
    _, winner, problem = found_for()
    assert with_found_order(question(replace(problem, memory_headroom=0.999)), winner) is None


def test_found_order_is_in_notes_and_files(tmp_path: Path) -> None:
    found, winner, problem = found_for()
    assert found is not None
    winner_s = found.iteration_time_s / 0.8
    part = alternative_part(found, replace(winner, prediction=replace(winner.price, iteration_time_s=winner_s)))
    assert part.strategy == found.strategy.to_json() and part.could_save == pytest.approx(0.2)
    (line,) = advice_notes(AdvicePart.of(found_order=part), problem)
    assert "(--pipeline-schedule optimised --vocabulary-stages) rank 1 takes " in line and ", 20% less: " in line
    other = alternative_part(replace(found, strategy=replace(BEST, schedule=OPTIMISED)), winner)
    document, asked = answer(advice=AdvicePart.of(found_order=other)), answers.small_problem()
    costs = Pricing(asked.workload, asked.cluster).cost_model.pipeline_costs
    written = write_files(document, asked, costs, directory=str(tmp_path), html=None).launch
    folder = tmp_path / FOUND_ORDER
    assert {str(folder / name) for name in ("strategy.json", "cluster.json", "launch.sh")} <= set(written.files)
    assert Strategy.from_json(json.loads((folder / "strategy.json").read_text())).schedule == OPTIMISED


@pytest.mark.parametrize("flags", [("--schedule", "1f1b,optimised"), ("--vocabulary-stages", "on")])
def test_values_that_are_not_ranked_are_refused(flags: tuple[str, str]) -> None:
    name, text = flags
    (dimension,) = [each for each in DIMENSIONS if each.flag == name]
    with pytest.raises(ConfigError, match=f"{name} .* is not ranked.*rank reports its saving for the winner"):
        dimension.parse(text)


SLOWER = replace(SLOW, name="slower", half_flops=50e12)
MIXED = Cluster(nodes=(node("a", SLOW), node("b", SLOWER), node("c", FAST), node("d", FAST)))


def test_sizes_of_parts() -> None:
    assert sizes_of_parts(MIXED) == [6, 4, 2]
    assert [[each.name for each in MIXED.at_most(size).nodes] for size in (6, 4, 2)] == [
        ["a", "c", "d"],
        ["c", "d"],
        ["c"],
    ]
    # Numbers of nodes that divide all of them, or are powers of two.
    assert sizes_of_parts(small_cluster(num_nodes=12)) == [12, 6, 2]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=8)) == [4, 2, 1]
    assert sizes_of_parts(small_cluster(num_nodes=1, num_devices=1)) == []


def test_part_has_whole_nodes() -> None:
    assert MIXED.at_most(5).num_devices == 4 and MIXED.at_most(100) == Cluster(nodes=MIXED.nodes)
    (alone,) = MIXED.at_most(1).nodes
    assert alone.name == "c" and alone.num_devices == 1
