"""Sums of gradients over ranks: in few messages, each where its tensor is."""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.gradients.reductions import buckets, sum_in_buckets, sum_over_sharing_ranks
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

CUT = (9, 1, 8, 6)


def _tensor_parallel_pairs() -> tuple[float, float, bool]:
    """Of pp 2 x tp 2: a tied weight that starts as its rank's number, then as its gradient."""
    tied = TiedLayerSpec("weight", nn.Linear, 2, 2, bias=False)
    model = TokenSlicePipelineModule(
        [tied, tied],
        layout=ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2),
        token_slices=TokenSlices((4,)),
    )
    weight = next(model.parameters())
    weight.data.fill_(dist.get_rank())
    model._synchronize_tied_weights()
    started = weight.data[0, 0].item()
    weight.grad = torch.full_like(weight, 10.0**model.global_rank)
    sum_over_sharing_ranks(model.get_tied_weights_and_groups())
    return started, weight.grad[0, 0].item(), getattr(weight, "ds_pipe_replicated", False)


def test_each_tensor_parallel_rank_shares_with_its_own_kind() -> None:
    # Ranks 0 and 1 have the first stage, whose weights the copies start from.
    found = run_distributed(_tensor_parallel_pairs, 4)
    assert found == [(0.0, 101.0, False), (1.0, 1010.0, False), (0.0, 101.0, True), (1.0, 1010.0, True)]


def _count_sums() -> list[int]:
    """Sizes of the messages in which the gradients of tied weights are summed over stages."""
    setup = Setup(pp=2, cut=CUT)
    blocks = [LayerSpec(models.Block) for _ in range(2)]
    norm = TiedLayerSpec("norm", nn.LayerNorm, models.HIDDEN, tied_weight_attr=["weight", "bias"])
    layers = models.layers()
    engine = build(setup, layers=[layers[0], norm, *blocks, norm, layers[-1]], partition="0,3,6")
    ranks = dist.get_process_group_ranks(engine.grid.get_pipe_parallel_group())
    sizes = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *rest: Any, **keywords: Any) -> Any:
        if keywords.get("group") and dist.get_process_group_ranks(keywords["group"]) == ranks and tensor.dim():
            sizes.append(tensor.numel())
        return original(tensor, *rest, **keywords)

    with patch.object(dist, "all_reduce", counted):
        engine.train_batch(feed(engine, setup))
    return sizes


def test_weights_of_the_same_ranks_travel_in_one_message() -> None:
    assert run_distributed(_count_sums, 2) == [[models.VOCAB * models.HIDDEN + 2 * models.HIDDEN]] * 2


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([torch.float32, torch.float64]))),
    bucket_bytes=st.integers(1, 400),
)
def test_buckets_keep_order_dtype_and_size(sizes: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    found = list(buckets(tensors, bucket_bytes))
    for dtype in (torch.float32, torch.float64):
        here = [tensor for bucket in found for tensor in bucket if tensor.dtype is dtype]
        assert [id(tensor) for tensor in here] == [id(tensor) for tensor in tensors if tensor.dtype is dtype]
    for bucket in found:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket) <= bucket_bytes
    for one, other in pairwise(found):
        if one[0].dtype is other[0].dtype:  # none could have been larger
            assert sum(tensor.nbytes for tensor in one) + other[0].nbytes > bucket_bytes


def _sums(bucket_bytes: int) -> list[list[float]]:
    rank = dist.get_rank() + 1.0
    tensors = [
        torch.arange(3.0) * rank,
        torch.full((2, 2), rank, dtype=torch.double),
        torch.ones(4, 3).t()[:, ::2] * rank,
        torch.ones(4, 6)[:, ::2].mul_(rank),  # not contiguous
    ]
    sum_in_buckets(tensors, dist.group.WORLD, bucket_bytes=bucket_bytes)
    return [tensor.flatten().tolist() for tensor in tensors]


def _all_sums() -> list[list[list[float]]]:
    return [_sums(bucket_bytes) for bucket_bytes in (1, 30, 1 << 20)]


def test_sums_land_where_the_tensors_are() -> None:
    expected_sums = [[0.0, 3.0, 6.0], [3.0] * 4, [3.0] * 6, [3.0] * 12]
    assert run_distributed(_all_sums, 2) == [[expected_sums] * 3] * 2
