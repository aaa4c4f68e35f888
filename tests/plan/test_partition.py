"""Which layers stand on which stage."""

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import StagePartition

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


@given(layer_weights=weights, data=st.data())
def test_stages_hold_every_layer_once_in_order(layer_weights: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(layer_weights)))
    partition = StagePartition.balanced(layer_weights, num_stages)
    layers = [layer for stage in range(partition.num_stages) for layer in partition.layers(stage)]
    assert layers == list(range(len(layer_weights)))


def test_a_heavy_layer_stands_alone() -> None:
    assert StagePartition.balanced([1, 1, 9, 1, 1], 3) == StagePartition((0, 2, 3, 5))


@given(bounds=st.sets(st.integers(1, 99), min_size=1, max_size=8))
def test_text_reads_back(bounds: set[int]) -> None:
    partition = StagePartition((0, *sorted(bounds)))
    assert StagePartition.parse(str(partition)) == partition


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text(json.dumps([0, 5, 12]))
    assert StagePartition.parse(str(path)) == StagePartition((0, 5, 12))


@pytest.mark.parametrize("bounds", [(), (0,), (1, 5), (0, 5, 5), (0, 5, 3)])
def test_bounds_must_rise_from_zero(bounds: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="does not rise from 0"):
        StagePartition(bounds)


@pytest.mark.parametrize("text", ["balance", "0,five", "missing.json"])
def test_what_is_neither_a_method_nor_bounds_nor_a_file_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is neither uniform.* nor a list.* file of one"):
        StagePartition.parse(text)


@pytest.mark.parametrize("content", ['{"bounds": [0, 5]}', "[0, 2.5, 5]", '["0", "5"]', "[0, true]"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text(content)
    with pytest.raises(PlanError, match="does not hold a list of whole numbers"):
        StagePartition.parse(str(path))


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_text("0 5 12")
    with pytest.raises(PlanError, match=r"file of one .*Extra data"):
        StagePartition.parse(str(path))


@pytest.mark.parametrize(
    "content", [b"\xff\xfe[0, 5]", b"[0, " + b"7" * 5000 + b"]", b"[" * 10_000], ids=["a", "b", "c"]
)
def test_a_file_that_nobody_can_read_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"file of one .*(is not UTF-8 text \(byte 0 is 0xff\)|is not JSON)"):
        StagePartition.parse(str(path))


@pytest.mark.parametrize("text", ["a\x00b", "9" * 5000, "0," + "9" * 5000])
def test_a_list_or_a_name_beyond_sense_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^stage partition .* cannot be read .*: give one of these, a list as 0,5,12$"):
        StagePartition.parse(text)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(12, 3), (11, 2)])
def test_a_partition_of_another_model_is_refused(num_layers: int, num_stages: int) -> None:
    with pytest.raises(PlanError, match=f"give {num_stages + 1} bounds, the last one {num_layers}"):
        StagePartition((0, 5, 12)).covering(num_layers, num_stages)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_layers_are_refused(num_stages: int) -> None:
    with pytest.raises(PlanError, match="give between 1 and 3 stages"):
        StagePartition.uniform(3, num_stages)
    with pytest.raises(PlanError, match="give between 1 and 3 stages"):
        StagePartition.balanced([1.0, 1.0, 1.0], num_stages)
