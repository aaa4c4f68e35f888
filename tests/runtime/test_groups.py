"""Process groups: few calls that take all ranks, the right members, and no rank that waits for another name."""

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import own_group
from tests.distributed import run_distributed

AT_SCALE = ParallelLayout(pipeline_parallel_size=64, data_parallel_size=8, tensor_parallel_size=2, num_token_slices=4)
PIPELINES = [[0, 2], [1, 3]]


def counted_calls(rank: int, splits: bool) -> Counter[str]:
    """Calls that make groups while an engine of 1,024 ranks starts, on one rank over a process group that is fake."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=AT_SCALE.world_size)
    calls: Counter[str] = Counter()
    new_group = dist.new_group

    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls["of members" if keywords.get("use_local_synchronization") else "of all ranks"] += 1
        return new_group(*arguments, **keywords)

    def split_group(split_ranks: list[list[int]], timeout: Any) -> dist.ProcessGroup:
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(AT_SCALE.world_size))
        calls["of all ranks"] += 1
        return new_group(next(ranks for ranks in split_ranks if rank in ranks), use_local_synchronization=True)

    ends = [TiedLayerSpec("word", nn.Linear, 4, 4), TiedLayerSpec("word", nn.Linear, 4, 4, forward_fn=nn.Linear)]
    middle = [LayerSpec(nn.Linear, 4, 4) for _ in range(AT_SCALE.pipeline_parallel_size - 2)]
    with (
        mock.patch.object(dist, "new_group", counting),
        mock.patch.object(dist, "split_group", split_group),
        mock.patch("deepspeed_ext.runtime.topology._splits", lambda: splits),
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
    return calls


@pytest.mark.parametrize(("rank", "splits", "most"), [(1023, False, 1), (517, True, 10)], ids=["gloo", "nccl"])
def test_calls_that_take_all_ranks_grow_with_the_logarithm_at_most(rank: int, splits: bool, most: int) -> None:
    (calls,) = run_distributed(counted_calls, 1, rank, splits)
    assert 0 < calls["of all ranks"] <= most
    assert sum(calls.values()) >= 8


def members_and_sums() -> list[tuple[list[int], float]]:
    """What each of several groups sums, some of which leave ranks out; then with ranks in unequal numbers of groups."""
    rank, seen = dist.get_rank(), []
    groups_of_both = (PIPELINES, [[0, 3]], PIPELINES, [[0, 1, 2, 3]]) * 2
    for number, groups in enumerate(groups_of_both):
        if number == len(groups_of_both) // 2:
            dist.new_group([0, 1])
        group = own_group(groups)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        seen.append((dist.get_process_group_ranks(group), total.item()))
    return seen


def test_each_rank_gets_its_own_group() -> None:
    for rank, seen in enumerate(run_distributed(members_and_sums, 4)):
        pipeline = PIPELINES[rank % 2]
        expected = [pipeline, [0, 3] if rank in (0, 3) else [rank], pipeline, [0, 1, 2, 3]] * 2
        assert seen == [(ranks, float(sum(ranks))) for ranks in expected]
