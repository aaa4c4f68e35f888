"""The topology with its token axis agrees with the layout; process groups have the right members and few calls."""

import os
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from hypothesis import given
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed_ext.plan.layout import Coordinate, ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.device import num_streams
from deepspeed_ext.plan.programs.program import MESSAGE_CTAS
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import SequenceParallelRanks, TokenSliceTopology, own_group
from tests.distributed import run_distributed
from tests.runtime.training import Setup, build
from tests.strategies import layouts

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=3, num_token_slices=8)
SHARING = ParallelLayout(data_parallel_size=2, sequence_parallel_size=2)
AT_SCALE = ParallelLayout(pipeline_parallel_size=64, data_parallel_size=8, tensor_parallel_size=2, num_token_slices=4)
PIPELINES = [[0, 2], [1, 3]]


def test_token_axis_has_one_rank_and_all_its_steps() -> None:
    topology = TokenSliceTopology(LAYOUT)
    assert topology.get_axis_names() == ["pipe", "token", "data", "model"]
    assert topology.get_dim("token") == 1
    assert topology.world_size() == LAYOUT.world_size == 12


@given(layout=layouts())
def test_ranks_have_the_coordinates_of_the_layout(layout: ParallelLayout) -> None:
    topology = TokenSliceTopology(layout)
    assert topology.world_size() == layout.world_size
    for rank in range(layout.world_size):
        place = topology.get_coord(rank)
        data, sequence = divmod(place.data, layout.sequence_parallel_size)
        assert Coordinate(place.pipe, data, sequence, place.model) == layout.coordinate(rank)
        assert place.token == 0
    for axis, name in (("pipe", "pipe"), ("model", "tensor")):
        found = sorted(map(tuple, topology.get_axis_comm_lists(axis)))
        assert found == sorted(tuple(group) for group in layout.groups(name))


@given(layout=layouts())
def test_ranks_with_the_same_weights_are_the_replicas_of_deepspeed(layout: ParallelLayout) -> None:
    replicas = TokenSliceTopology(layout).get_axis_comm_lists("data")
    assert all(len(ranks) == layout.num_weight_copies for ranks in replicas)
    for ranks in replicas:
        places = {layout.coordinate(rank)[::3] for rank in ranks}
        assert len(places) == 1, "of one stage and tensor-parallel rank"


@pytest.mark.parametrize(
    ("rank", "axes", "name"),
    [
        # DeepSpeed finds layer files by this pattern; `layer_00-token_00-model_00` would hide them.
        (0, {}, "model_00"),
        (11, {}, "model_02"),
        (11, {"omit_axes": ["data"]}, "pipe_01-token_00-model_02"),
    ],
)
def test_names_of_layer_files_have_no_token_part(rank: int, axes: dict[str, list[str]], name: str) -> None:
    assert TokenSliceTopology(LAYOUT).get_rank_repr(rank, **axes) == name


def counted_calls(rank: int, splits: bool) -> Counter[str]:
    """Calls that make groups while an engine of 1,024 ranks starts, on one rank over a process group that is fake."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=AT_SCALE.world_size)
    calls: Counter[str] = Counter()
    new_group = dist.new_group

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls["of members" if keywords.get("use_local_synchronization") else "of all ranks"] += 1
        return new_group(*arguments, **keywords)

    limits: Counter[int | None] = Counter()

    def split_group(split_ranks: list[list[int]], timeout: Any, pg_options: None) -> dist.ProcessGroup:
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(AT_SCALE.world_size))
        calls["of all ranks"] += 1
        return new_group(next(ranks for ranks in split_ranks if rank in ranks), use_local_synchronization=True)

    ends = [TiedLayerSpec("word", nn.Linear, 4, 4), TiedLayerSpec("word", nn.Linear, 4, 4, forward_fn=nn.Linear)]
    middle = [LayerSpec(nn.Linear, 4, 4) for _ in range(AT_SCALE.pipeline_parallel_size - 2)]
    with (
        mock.patch.object(dist, "new_group", counting),
        mock.patch.object(dist, "split_group", split_group),
        mock.patch("deepspeed_ext.runtime.topology._splits", lambda: splits),
        mock.patch("deepspeed_ext.runtime.topology._options", lambda _, max_ctas: limits.update([max_ctas])),
        mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(AT_SCALE.world_size)),
    ):
        token_slices = TokenSlices((2,) * AT_SCALE.num_token_slices)
        module = TokenSlicePipelineModule([ends[0], *middle, ends[1]], layout=AT_SCALE, token_slices=token_slices)
        settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        engine, *_ = initialize(module, settings, optimizer=torch.optim.Adam(module.parameters()))
        grid, layout = engine.grid, AT_SCALE
        made = {
            "pipe": grid.get_pipe_parallel_group(),
            "data": grid.get_data_parallel_group(),
            "tensor": grid.get_slice_parallel_group(),
        }
        for axis, group in made.items():
            (expected,) = [ranks for ranks in layout.groups(axis) if rank in ranks]
            assert dist.get_process_group_ranks(group) == expected
        replica = dist.get_process_group_ranks(grid.get_model_parallel_group())
        assert {layout.coordinate(each).data for each in replica} == {layout.coordinate(rank).data}
        assert len(replica) == grid.get_model_parallel_world_size() == 128
        assert replica[grid.get_model_parallel_rank()] == rank
        # Sequence-parallel ranks and shared modules would add a group each.
        groups = len(dist.distributed_c10d._world.pg_map)
        assert limits[MESSAGE_CTAS] == 4 and set(limits) == {MESSAGE_CTAS, None}
        assert 1 + groups + 2 == num_streams(PipelineShape(AT_SCALE.pipeline_parallel_size, 2, 4)), groups
    return calls


SCALES = [(1023, False, 1), (517, True, 10)]
"""A rank, whether groups are split as with NCCL, and the most calls of all ranks."""


def _all_counted() -> list[Counter[str]]:
    return [counted_calls(rank, splits) for rank, splits, _ in SCALES]


def test_calls_that_take_all_ranks_grow_with_the_logarithm_at_most() -> None:
    (counted,) = run_distributed(_all_counted, 1)
    for (_, _, most), calls in zip(SCALES, counted, strict=True):
        assert 0 < calls["of all ranks"] <= most
        assert sum(calls.values()) >= 8


@pytest.mark.parametrize(("agree", "splits"), [(True, True), (True, False), (False, False)])
def test_nccl_gets_the_limit_of_a_group_with_options_of_its_own(
    agree: bool, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make(*_: object, pg_options: Any, **__: object) -> object:
        made.append(pg_options)
        return object()

    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    stubs = {"get_backend": "nccl", "get_rank": 1, "get_world_size": 3}
    for name, value in stubs.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "new_group", make)
    monkeypatch.setattr(dist, "split_group", make)
    monkeypatch.setattr("deepspeed_ext.runtime.topology._names_agree", lambda: agree)
    monkeypatch.setattr("deepspeed_ext.runtime.topology._splits", lambda: splits)
    timeout = timedelta(seconds=5)
    own_group([[0, 1]], timeout, max_ctas=2)
    own_group([[0, 1]], timeout)
    limited = made[: len(made) // 2]
    assert len(limited) == len(set(map(id, limited))) == (1 if agree else 2)
    assert all((each.config.max_ctas, each._timeout) == (2, timeout) for each in limited)
    assert set(made[len(limited) :]) == {None}


def _members_and_sums() -> list[tuple[list[int], float]]:
    """Sums of several groups, some of which leave ranks out; then with ranks in unequal numbers of groups."""
    rank, seen = dist.get_rank(), []
    groups_of_both = (PIPELINES, [[0, 3]], PIPELINES, [[0, 1, 2, 3]]) * 2
    for number, groups in enumerate(groups_of_both):
        if number == len(groups_of_both) // 2:
            if rank < 2:
                dist.new_group([0, 1], use_local_synchronization=True)
        group = own_group(groups)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        seen.append((dist.get_process_group_ranks(group), total.item()))
    return seen


def _grid() -> dict[str, object]:
    engine = build(Setup(pp=2, dp=2, cut=(9, 1, 8, 6)))
    grid, ranks = engine.grid, SequenceParallelRanks.of(SHARING)
    return {
        "sizes": (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()),
        "place": Coordinate(grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank(), 0, 0),
        "world": engine.dp_world_size,
        "slices": engine.grid._topo.layout.num_token_slices,
        "sequence": (ranks.rank, ranks.size, dist.get_process_group_ranks(ranks.group)),
        "sums": _members_and_sums(),
    }


def test_each_rank_gets_its_own_groups_by_the_layout() -> None:
    layout = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=2)
    for rank, found in enumerate(run_distributed(_grid, 4)):
        pipeline = PIPELINES[rank % 2]
        members = [pipeline, [0, 3] if rank in (0, 3) else [rank], pipeline, [0, 1, 2, 3]] * 2
        assert found.pop("sums") == [(ranks, float(sum(ranks))) for ranks in members]
        assert found.pop("sequence") == (rank % 2, 2, [rank - rank % 2, rank - rank % 2 + 1])
        assert found == {"sizes": (2, 2), "place": layout.coordinate(rank), "world": 2, "slices": 4}
