"""Sums of gradients over ranks: in few messages, each where its tensor is."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.gradients.reductions import buckets, sum_in_buckets, sum_over_sharing_ranks
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.shared_layers import layers, share
from tests.runtime.training import Setup, build, feed

CUT = (9, 1, 8, 6)


def _tensor_parallel_pairs() -> tuple[float, float, bool]:
    """Of pp 2 x tp 2: a weight that starts as its rank's number, then as its gradient."""
    model = TokenSlicePipelineModule(
        [LayerSpec(nn.Linear, 2, 2, bias=False)] * 2,
        layout=ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2),
        token_slices=TokenSlices((4,)),
    )
    weight = next(model.parameters())
    weight.data.fill_(dist.get_rank())
    model.share_layers({1: "weight", 0: "weight"})
    model.connect_shared_modules()
    started = weight.data[0, 0].item()
    weight.grad = torch.full_like(weight, 10.0**model.global_rank)
    sum_over_sharing_ranks(model.get_tied_weights_and_groups())
    return started, weight.grad[0, 0].item(), weight.ds_pipe_replicated


def test_each_tensor_parallel_rank_shares_with_its_own_kind() -> None:
    # Ranks 0 and 1 are the first stage, and copies start as those of the second, which is named first.
    found = run_distributed(_tensor_parallel_pairs, 4)
    assert found == [(2.0, 101.0, True), (3.0, 1010.0, True), (2.0, 101.0, False), (3.0, 1010.0, False)]


def _count_sums() -> list[int]:
    """Messages of the gradient sums of a step, with weights shared by one list of ranks, and by two."""
    found = []
    for prepare in (share, _share_more):
        engine = build(Setup(pp=2, cut=CUT), layers=layers(), prepare=prepare)
        called = []
        original = dist.all_reduce
        group = engine.grid.get_pipe_parallel_group()
        ranks = dist.get_process_group_ranks(group)

        def counted(tensor: Tensor, *rest: Any, called=called, original=original, ranks=ranks, **keywords: Any) -> Any:
            if keywords.get("group") and dist.get_process_group_ranks(keywords["group"]) == ranks and tensor.dim():
                called.append(tensor.numel())
            return original(tensor, *rest, **keywords)

        dist.all_reduce = counted
        try:
            engine.train_batch(feed(engine, Setup(pp=2, cut=CUT)))
        finally:
            dist.all_reduce = original
        found.append(sum(called) if len(called) == 1 else -len(called))
    return found


def _share_more(model: TokenSlicePipelineModule) -> None:
    """Two norms and a matrix beside the words: four weights in all."""
    share(model)
    model.share_layers({1: ["norm.weight", "out.weight"], 5: ["norm.weight", "out.weight"]})
    model.share_layers({2: "norm.bias", 4: "norm.bias"})


def test_weights_of_the_same_ranks_travel_in_one_message() -> None:
    words = models.VOCAB * models.HIDDEN
    more = words + 2 * models.HIDDEN + models.HIDDEN**2
    assert run_distributed(_count_sums, 2) == [[words, more]] * 2


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
