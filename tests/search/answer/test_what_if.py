"""Changes of a question: orders that are found, fewer devices, headroom, the distance to fit; and their notes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.search.answer.json_documents import (
    AdvicePart,
    FewerDevicesPart,
    NetworkPart,
    OtherWinnerPart,
    RemedyPart,
    SensitivityPart,
    TooFullPart,
)
from megatron_terapipe.search.answer.output_files import write_files
from megatron_terapipe.search.answer.what_if import (
    FOUND_ORDER,
    advice_notes,
    alternative_part,
    distance_text,
    distance_to_fit,
    fewer_devices_part,
    nearest_to_fitting,
    on_fewer_devices,
    sizes_of_parts,
    with_found_order,
)
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.trainers import DEEPSPEED
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import LONG_SEQUENCE, SearchProblem
from megatron_terapipe.strategy import Strategy
from tests.search.answer import answers
from tests.search.price.machines import gpt
from tests.search.problems import FAST, SLOW, legal_strategies, node, question, small_cluster, small_problem

LARGE_VOCABULARY = gpt(8, 1024, 8, 2048, 64_000, untie_embeddings_and_output_weights=True)
PIPELINE = Strategy(pipeline_parallel_size=4, num_token_slices=4, global_batch_size=8)


def found_for(
    model: ModelConfig = LARGE_VOCABULARY, strategy: Strategy = PIPELINE, **constraints: tuple[object, ...]
) -> tuple[Ranked | None, Ranked, SearchProblem]:
    cluster = small_cluster(num_nodes=1, num_devices=4)
    asked = question(SearchProblem(workload=gpt_workload(model), cluster=cluster, global_batch_size=8), constraints)
    winner = Ranked(strategy=strategy, prediction=asked.pricing.predict(strategy))
    return with_found_order(asked, winner), winner, asked.problem


def test_a_large_output_layer_is_cut_into_vocabulary_stages_at_the_price_that_they_have() -> None:
    found, winner, problem = found_for()
    assert found is not None
    assert found.strategy == replace(PIPELINE, schedule=OPTIMISED, vocabulary_stages=True)
    assert found.prediction == Pricing(problem.workload, problem.cluster).predict(found.strategy)
    assert found.iteration_time_s < 0.95 * winner.iteration_time_s


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
        assert with_found_order(question(problem).changed(**changes), winner) is None


def test_found_order_is_in_notes_and_files(tmp_path: Path) -> None:
    found, winner, problem = found_for()
    assert found is not None
    winner_s = found.iteration_time_s / 0.8
    part = alternative_part(found, replace(winner, prediction=replace(winner.price, iteration_time_s=winner_s)))
    assert part is not None and part.strategy == found.strategy.to_json() and part.could_save == pytest.approx(0.2)
    (line,) = advice_notes(AdvicePart(found_order=part), problem)
    assert "(--pipeline-schedule optimised --vocabulary-stages) rank 1 takes " in line and ", 20% less: " in line
    other = alternative_part(replace(found, strategy=replace(answers.BEST, schedule=OPTIMISED)), winner)
    document, asked = answers.answer(advice=AdvicePart(found_order=other)), answers.small_problem()
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


def parts_for(problem: SearchProblem) -> list[FewerDevicesPart]:
    asked = question(problem, CONSTRAINTS)
    winner = asked.search(effort=1.0).entries[0]
    found = on_fewer_devices(asked, winner)
    for part, entry in found:
        # It is a strategy for the part, at the price that it has there.
        assert entry.strategy.world_size == part.num_devices
        price = Pricing(problem.workload, part).predict(entry.strategy)
        assert price.iteration_time_s == pytest.approx(entry.iteration_time_s)
    return [fewer_devices_part(part, entry, winner, problem) for part, entry in found]


USELESS = replace(SLOW, half_flops=2e12, memory_bandwidth=20e9)


@pytest.mark.parametrize(
    ("devices", "network", "note"),
    [
        ((FAST, USELESS), 0.05e9, "on 2 of the 4 devices, without the nodes of slow, an iteration takes "),
        ((FAST, replace(FAST, name="other")), 400e9, ""),
        ((FAST,) * 4, 0.02e9, "FEWER DEVICES ARE FASTER: on 2 of the 8 devices"),
        ((FAST,) * 4, 400e9, ""),
    ],
)
def test_slow_devices_and_slow_links_are_left_out(devices: tuple, network: float, note: str) -> None:
    cluster = Cluster(nodes=tuple(node(f"host{at}", each, network=network) for at, each in enumerate(devices)))
    problem = small_problem(cluster, global_batch_size=64)
    found = parts_for(problem)
    lines = advice_notes(AdvicePart(fewer_devices=found), problem)
    total = cluster.num_devices
    assert all(part.cost_ratio == pytest.approx(part.time_ratio * part.num_devices / total) for part in found)
    if not note:
        assert not any("FEWER" in line for line in lines) and (len(devices) > 2 or not lines)
        return
    assert note in lines[0] and lines[0].endswith("add --devices-at-most 2 to rank them")
    assert [part.num_devices for part in found] == ([4, 2] if total == 8 else [2])


PLAIN = Strategy(data_parallel_size=4, global_batch_size=8).to_json()


def full(could_save: float) -> AdvicePart:
    part = TooFullPart(strategy=PLAIN, iteration_time_s=1.0, left_free=0.0217, could_save=could_save)
    return AdvicePart(too_full=part)


def decided(*changes: OtherWinnerPart, given: float | None = None, network: tuple[NetworkPart, ...] = ()) -> AdvicePart:
    found = SensitivityPart(
        changes=list(changes), network=list(network), network_bandwidth=given, num_constants=25, num_contenders=6
    )
    return AdvicePart(sensitivity=found)


def other(constant: str, change: float, regret: float, *, is_memory: bool = False) -> OtherWinnerPart:
    return OtherWinnerPart(constant=constant, change=change, strategy=PLAIN, regret=regret, is_memory=is_memory)


NETWORK = other("network_efficiency", -0.1, 0.02)
MEMORY = other("activation_factor", 0.1, 0.01, is_memory=True)


@pytest.mark.parametrize(
    ("advice", "words"),
    [
        (full(0.03), ("leaves 2.2% of a device", "the 5 % asked", "--memory-headroom 0.021", "saves 3.0%")),
        (full(0.004), ()),
        (
            decided(NETWORK, MEMORY),
            (
                "network_efficiency (share of a network card that collectives reach) 10% lower",
                "takes 2.0% longer; so do activation_factor +10% (1.0%)",
            ),
        ),
        (decided(), ()),
        (
            decided(given=25e9),
            ("200 Gbit/s a node are taken: rank 1 stays the best of 6 strategies from a quarter of it",),
        ),
        (
            decided(given=25e9, network=(NetworkPart(bandwidth=12e9, strategy=PLAIN, regret=0.03),)),
            ("below 96 Gbit/s rank 1 is not the best: at 50 Gbit/s dp 4", "is 3% faster"),
        ),
    ],
)
def test_notes(advice: AdvicePart, words: tuple[str, ...]) -> None:
    notes = advice_notes(advice, small_problem())
    assert len(notes) == bool(words)
    assert all(each in notes[0] for each in words), notes


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
    assert nearest is not None and nearest.memory["total"] == pytest.approx(least)
    assert nearest.usable_bytes == pytest.approx(0.95 * 3e9)
    # The memory of a device decides whether the rest fits without the optimizer state.
    bytes_left = nearest.memory["total"] - nearest.memory["optimizer"]
    for factor, fits in ((1.001, True), (0.999, False)):
        found = nearest_to_fitting(question(short(factor * bytes_left / 0.95), FEW))
        assert found is not None and found.fits_with_optimizer_on_host == fits
    # No distance where other rules are broken.
    assert distance_to_fit(question(short(3e9), {"tensor_parallel_size": (3,)})) is None


def test_every_remedy_makes_it_fit() -> None:
    constraints = {**FEW, "recompute": ("none",), "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,)}
    asked = question(short(5.6e9, seq_length=2048), constraints)
    distance = distance_to_fit(asked)
    assert distance is not None and distance.memory["total"] > distance.usable_bytes
    kinds = {(each.kind, each.value) for each in distance.remedies}
    assert ("constraint", "tensor_parallel_size") in kinds and "seq_length" in {kind for kind, _ in kinds}
    problem, config = asked.problem, asked.problem.workload.config
    for kind, value in kinds:
        if kind == "constraint":
            changed = asked.changed({name: each for name, each in constraints.items() if value and name != value})
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
    nearest, layers, stages = (
        found.fullness
        for more in ({}, {"recompute": ("full",)}, {"recompute": ("stage",)})
        if (found := nearest_to_fitting(question(problem, constraints | more))) is not None
    )
    assert nearest == stages < layers


def test_missing_memory_and_remedies() -> None:
    problem = small_problem(small_cluster(device=replace(FAST, memory_bytes=1e9)))
    found = distance_to_fit(question(problem))
    assert found is not None and found.memory["total"] > found.usable_bytes
    remedies = [
        RemedyPart.model_validate({"kind": kind, "value": value, "strategy": found.strategy})
        for kind, value in (
            ("devices", 8), ("seq_length", 256), ("key_value_gradients", "bf16"), ("constraint", "recompute"),
            ("constraint", ""),
        )
    ]  # fmt: skip
    part = found.model_copy(update={"remedies": remedies})
    text = distance_text(part, problem)
    assert "of 950 MB that a fast has (5 % kept free); it would fit with 8 such devices (4 nodes) or " in text
    assert "or --seq-length 256 or --key-value-gradients bf16 or --recompute free or devices of " in text
    (note,) = advice_notes(AdvicePart(distance_to_fit=part), problem)
    assert "framework 3.5 GB" in note and "of 950 MB. With the optimizer state in the memory of the host (" in note
    offloaded = part.model_copy(update={"fits_with_optimizer_on_host": True})
    (other,) = advice_notes(AdvicePart(distance_to_fit=offloaded), problem)
    assert "it would not fit either: " in note and "it would fit: " in other
