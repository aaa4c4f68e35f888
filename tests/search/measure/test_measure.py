"""Measurements of the layers of a model in token slices, of links and of the engine."""

from argparse import ArgumentTypeError
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.flags import whole_numbers
from megatron_terapipe.search.measure.sizes import (
    MeasuredRun,
    MeasuredSizes,
    Nodes,
    default_numbers_of_token_slices,
    link_classes,
)
from megatron_terapipe.search.price.profile import LayerShape, OpPoint, ProfiledLink
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.trained_model import TrainedModel
from tests.distributed import run_distributed

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=128,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="[1,0]",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
"""A layer with a gated delta net, and one with attention."""


def sizes(**more: object) -> MeasuredSizes:
    values: dict[str, object] = {
        "model": MODEL,
        "precision": "fp32",
        "tensor_parallel_sizes": (1, 2),
        "micro_batch_sizes": (2, 1),
        "nums_token_slices": (1, 4),
        "budget_s": 1.0,
    }
    return MeasuredSizes(**(values | more))  # type: ignore[arg-type]


LONGER = MeasuredRun(1, 1, 1, "none")
RUNS = ((1, "none"), (2, "none"), (2, "selective"))


class Found(NamedTuple):
    """Measurements of a rank: layers by run, and links."""

    layers: dict[tuple[int, str], list[tuple[LayerShape, list[OpPoint]]]]
    links: list[ProfiledLink]
    links_in_no_time: list[ProfiledLink]


def measure() -> Found:
    import torch.distributed as dist

    from megatron_terapipe.search.measure import layers as measuring
    from megatron_terapipe.search.measure import layers as measuring_links

    # One timing of each is enough for a test.
    measuring.MOST_VISITS, measuring.VISIT_S = 1, 0.0
    measuring_links.REPEATS, measuring_links.MESSAGE_BYTES, measuring_links.LEAST_SIZES = 1, (1024, 4096), 1
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][dist.get_rank()]
    device, found = torch.device("cpu"), {}
    for size, recompute in RUNS:
        ranks = measuring.IsolatedRanks(dist.get_rank() % size, size, alone)
        timer = measuring.LayerTimer(MODEL, torch.float32, device)
        run = MeasuredRun(size, 2, 4, recompute)
        config = Strategy(recompute=recompute).config(MODEL)
        built = measuring.build_layers(TrainedModel(), config, ranks, torch.float32, device)
        found[size, recompute] = list(timer.points(built, [run, LONGER], lambda run: False).items())
    nodes = measuring_links.nodes_of_ranks()
    in_no_time = measuring_links.measure_links(device, nodes, budget_s=0.0)
    return Found(found, measuring_links.measure_links(device, nodes), in_no_time)


@pytest.fixture(scope="module")
def found() -> Found:
    """Measurements of the first of two ranks; those of the other are equal, as means over both."""
    first, second = run_distributed(measure, 2)
    assert first == second
    return first


@pytest.mark.parametrize("run", RUNS)
def test_every_kind_of_layer_is_timed_at_every_token_slice(run: tuple[int, str], found: Found) -> None:
    shapes = {LayerShape.of(layer) for layer in gpt_workload(MODEL).layers}
    expected = shapes if run[1] == "none" else {shape for shape in shapes if shape.kind == "block"}
    assert {shape for shape, _ in found.layers[run]} == expected
    for shape, points in found.layers[run]:
        assert [point[:3] for point in points] == [*((2, start, start + 8) for start in (0, 8, 16, 24)), (1, 0, 32)]
        assert all(point.forward_s > 0 and point.input_gradient_s + point.weight_gradient_s > 0 for point in points)
        if shape.kind == "block":
            assert all(point.weight_gradient_s > 0 and point.input_gradient_s > 0 for point in points)


def test_links_are_timed_by_size(found: Found) -> None:
    links = [(link.where, link.what, link.num_ranks, len(link.points)) for link in found.links]
    assert links == [("inside", "all_reduce", 2, 2), ("inside", "transfer", 2, 2)]
    assert all(seconds > 0 for link in found.links for _, seconds in link.points)
    assert [[size for size, _ in link.points] for link in found.links_in_no_time] == [[1024], [1024]]


def links_of_two_nodes() -> list[ProfiledLink]:
    import os

    import torch.distributed as dist

    from megatron_terapipe.search.measure import layers as measuring

    measuring.REPEATS, measuring.MESSAGE_BYTES = 1, (1024, 4096)
    os.environ["CROSS_RANK"] = str(dist.get_rank() // 2)
    nodes = measuring.nodes_of_ranks()
    assert nodes == [[0, 1], [2, 3]]
    return measuring.measure_links(torch.device("cpu"), nodes)


def test_every_class_of_links_between_nodes_is_timed() -> None:
    first, *others = run_distributed(links_of_two_nodes, 4)
    assert others == [first] * 3
    assert [(link.where, link.what, link.num_ranks, link.ranks_per_node, link.flows) for link in first] == [
        ("inside", "all_reduce", 2, 2, 1),
        ("inside", "transfer", 2, 2, 1),
        ("network", "all_reduce", 2, 1, 1),
        ("network", "transfer", 2, 1, 1),
        ("network", "all_reduce", 2, 1, 2),
        ("network", "all_reduce", 4, 2, 1),
        ("network", "transfer", 2, 1, 2),
    ]
    assert all(len(link.points) == 2 and seconds > 0 for link in first for _, seconds in link.points)


def engine() -> object:
    from megatron_terapipe.search.measure import layers as measuring

    measuring.STEPS = 10**9
    return measuring.measure_engine(MODEL, "fp32", 2, budget_s=0.0)


def test_the_engine_is_timed_around_its_ops_until_the_time_is_over() -> None:
    (found,) = run_distributed(engine, 1)
    assert found.op_s > 0
    assert found.optimizer_s_per_parameter >= 0
    assert found.iteration_s >= 0


def test_extremes_are_measured_first() -> None:
    runs = list(sizes(micro_batch_sizes=(1, 2, 4), nums_token_slices=(1, 2, 4)).runs(2, "none"))
    pairs = [(run.micro_batch_size, run.num_token_slices) for run in runs]
    assert pairs[:4] == [(1, 1), (1, 4), (4, 1), (4, 4)]
    assert len(set(pairs)) == len(pairs) == 9
    assert len(list(sizes().runs(1, "selective"))) == 4
    layouts = list(sizes().layouts())
    assert [each[:2] for each in layouts] == [(1, "none"), (2, "none"), (1, "selective"), (2, "selective")]
    assert [each[2] for each in layouts] == pytest.approx([4 / 10, 4 / 6, 1 / 2, 1])
    assert default_numbers_of_token_slices(512) == (1, 2, 4, 8, 16)
    assert default_numbers_of_token_slices(48) == (1, 2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tensor_parallel_sizes": (3,)}, "--tensor-parallel-size 3 does not divide the 4 heads of the model: leave"),
        ({"tensor_parallel_sizes": (4,)}, "--tensor-parallel-size 4 does not divide the 2 groups of states of the"),
        ({"nums_token_slices": (5,)}, "--num-token-slices 5 does not divide the 32 tokens of a sequence: leave it out"),
    ],
)
def test_sizes_that_the_model_does_not_allow_are_refused(change: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(sizes(), **change)  # type: ignore[arg-type]
    assert str(caught.value).startswith(line)


def test_ranks_share_heads_only_of_layers_with_attention() -> None:
    states = replace(MODEL, num_attention_heads=1, num_key_value_heads=1, linear_attention_freq="[1,1]")
    assert sizes(model=states).tensor_parallel_sizes == (1, 2)


def test_lists_of_numbers() -> None:
    assert whole_numbers("4,1,2,1") == (1, 2, 4)
    for text in ("", "0", "1,x", "-1"):
        with pytest.raises(ArgumentTypeError, match=f"^{text} is not a list of whole numbers from 1, such as 1,2,4$"):
            whole_numbers(text)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([[0]], []),
        ([[0, 1, 2]], ["all-reduces of the 3 ranks of a node", "messages inside a node"]),
        ([[0], [1]], ["all-reduces of one rank of each of 2 nodes", "messages between nodes"]),
        (
            [[0, 1], [2, 3, 4], [5, 6]],
            [
                "all-reduces of the 2 ranks of a node",
                "messages inside a node",
                "all-reduces of one rank of each of 3 nodes",
                "messages between nodes",
                "all-reduces of one rank of each of 3 nodes, 2 at a time",
                "all-reduces of all 6 ranks",
                "messages between nodes, 2 at a time",
            ],
        ),
    ],
)
def test_each_class_is_measured_once(nodes: Nodes, words: list[str]) -> None:
    assert [each.words for each in link_classes(nodes)] == words


def test_flows_share_the_cards_of_their_node() -> None:
    node_of = {rank: rank // 2 for rank in range(8)}
    for each in link_classes([[0, 1], [2, 3], [4, 5], [6, 7]]):
        ranks = [rank for group in each.groups for rank in group]
        assert len(set(ranks)) == len(ranks), "a rank is in one group"
        for group in each.groups:
            of_nodes = [sum(node_of[rank] == node for rank in group) for node in {node_of[rank] for rank in group}]
            assert set(of_nodes) == {each.ranks_per_node}
            assert (len(of_nodes) > 1) == (each.where == "network")
            at_once = [other for other in each.groups if {node_of[r] for r in other} & {node_of[r] for r in group}]
            assert len(at_once) == each.flows
