"""Places of ranks on the axes, and layers of stages."""

from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import Coordinate, ParallelLayout, StagePartition
from tests.strategies import layouts


def test_tensor_ranks_are_neighbours_and_pipe_ranks_farthest_apart():
    layout = ParallelLayout(
        data_parallel_size=2, sequence_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    assert list(layout.coordinates()) == [Coordinate(*place) for place in product(range(2), repeat=4)]
    assert layout.coordinate(6) == Coordinate(pipe=0, data=1, sequence=1, tensor=0)
    assert layout.groups("tensor")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert layout.groups("sequence")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.groups("data")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert layout.groups("pipe")[:3] == [[0, 8], [1, 9], [2, 10]]
    folded = replace(layout, expert_parallel_size=4)
    assert folded.groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert folded.groups("expert_copies")[:5] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert layout.groups("expert_copies") == [[*range(8)], [*range(8, 16)]]


@given(layouts())
def test_each_expert_is_once_on_the_ranks_that_share_experts(layout: ParallelLayout) -> None:
    sharing, copies = layout.groups("expert"), layout.groups("expert_copies")
    for groups, size in ((sharing, layout.expert_parallel_size), (copies, layout.num_expert_copies)):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {size}
        assert all(len({layout.coordinate(rank).pipe for rank in group}) == 1 for group in groups)
    assert all(len({*one} & {*other}) <= 1 for one in sharing for other in copies)


@given(layouts(), st.sampled_from(["pipe", "data", "sequence", "tensor"]))
def test_ranks_are_coordinates_and_in_one_group_of_each_axis(layout, axis):
    coordinates = list(layout.coordinates())
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world_size))
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        places = [layout.coordinate(rank) for rank in group]
        assert [getattr(place, axis) for place in places] == list(range(len(group)))
        assert len({place._replace(**{axis: 0}) for place in places}) == 1
    others = {name: getattr(layout, name) for name in layout.__slots__ if name != "data_parallel_size"}
    assert ParallelLayout.for_world_size(layout.world_size, **others) == layout


weights = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


def heaviest(bounds: tuple[int, ...], layer_weights: list[float]) -> float:
    return max(sum(layer_weights[start:end]) for start, end in pairwise(bounds))


def every_partition(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]


@given(layer_weights=weights, data=st.data())
def test_balanced_is_as_light_as_the_best_of_all(layer_weights: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(layer_weights)))
    found = StagePartition.balanced(layer_weights, num_stages).covering(len(layer_weights), num_stages)
    best = min(heaviest(bounds, layer_weights) for bounds in every_partition(len(layer_weights), num_stages))
    assert heaviest(found.bounds, layer_weights) == best


@given(num_layers=st.integers(1, 60), data=st.data())
def test_uniform_stages_differ_by_one_layer_at_most(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    partition = StagePartition.uniform(num_layers, num_stages).covering(num_layers, num_stages)
    lengths = [len(partition.layers(stage)) for stage in range(num_stages)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(bounds=st.sets(st.integers(1, 99), min_size=1, max_size=8))
def test_text_reads_back(bounds: set[int]) -> None:
    partition = StagePartition((0, *sorted(bounds)))
    assert StagePartition.parse(str(partition)) == partition


def test_the_ends_may_be_empty() -> None:
    assert [*map(len, map(StagePartition.parse("0,0,2,5,5").layers, range(4)))] == [0, 2, 3, 0]
    assert StagePartition.parse("0,2,4,5").is_uniform and not StagePartition.parse("0,0,1,1").is_uniform


def test_a_file_of_bounds(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text("[0, 5, 12]")
    assert StagePartition.parse(str(path)) == StagePartition((0, 5, 12))
    for content in (b"0 5 12", b"\xff\xfe[0, 5]", b"[0, " + b"7" * 5000 + b"]"):
        path.write_bytes(content)
        with pytest.raises(PlanError, match=r"file of one .*(is not UTF-8 text \(byte 0 is 0xff\)|is not JSON)"):
            StagePartition.parse(str(path))
    message = r"^stage partition .* cannot be read .*: give one of these, a list as 0,5,12$"
    for text in ("a\x00b", "9" * 5000):
        with pytest.raises(PlanError, match=message):
            StagePartition.parse(text)
