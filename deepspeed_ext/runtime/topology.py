"""DeepSpeed's topology with a token axis, its grid, process groups at scale, sequence- and expert-parallel ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import module as deepspeed_module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from torch import Tensor, nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_rank

__all__ = ["ExpertParallelRanks", "SequenceParallelRanks", "TokenSliceGrid", "TokenSliceTopology"]


class TokenSliceTopology(ProcessTopology):
    """Axes pipe, token, data and model, where the token axis has one rank: token slices are steps (ADR 0001).

    DeepSpeed multiplies the extents of all axes to the world size, so an axis that costs no rank has extent 1.
    Sequence-parallel ranks have the same weights, so that for DeepSpeed they are data-parallel ranks too.
    Pipe comes first and model last because DeepSpeed's checkpoints count ranks in that order.

    Example:
        >>> topology = TokenSliceTopology(ParallelLayout(pipeline_parallel_size=4, num_token_slices=8))
        >>> topology.world_size(), topology.get_dim("token")
        (4, 1)
    """

    def __init__(self, layout: ParallelLayout) -> None:
        super().__init__(
            axes=["pipe", "token", "data", "model"],
            dims=[layout.pipeline_parallel_size, 1, layout.num_weight_copies, layout.tensor_parallel_size],
        )
        self.layout = layout

    def get_rank_repr(self, rank: int, omit_axes: Iterable[str] = ("data", "pipe", "token"), **separators: Any) -> str:
        """Name a rank without its token coordinate, which is always 0.

        DeepSpeed finds a checkpoint's layer files by the name `layer_00-model_00-...`, without a token part.
        """
        return super().get_rank_repr(rank, omit_axes=list(omit_axes), **separators)


def layer_file(layer: int, tensor_parallel_rank: int = 0) -> str:
    """File that DeepSpeed saves the weights of a pipeline layer to, given the names of ranks above."""
    return f"layer_{layer:02d}-model_{tensor_parallel_rank:02d}-model_states.pt"


class TokenSliceGrid(PipelineParallelGrid):
    """DeepSpeed's grid of ranks, with groups that are made axis by axis.

    Args:
        tensor_parallel_group: group of the ranks that share this rank's layers, if it exists already.
    """

    def __init__(
        self,
        topology: TokenSliceTopology,
        process_group: dist.ProcessGroup | None = None,
        *,
        tensor_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        # DeepSpeed's own makes each group of each axis in turn, by a call of all ranks: 664 calls for 64 stages x 2
        # tensor- x 8 data-parallel ranks. The attributes are those that it sets.
        rank = self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._topo = topology
        self.pipe_parallel_size, self.data_parallel_size = topology.get_dim("pipe"), topology.get_dim("data")
        self.model_parallel_size = topology.get_dim("model")
        assert self._is_grid_valid(), "the layout has as many ranks as the process group"
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups: list[list[int]] = []  # Only releases of torch without send and receive need them.

        replicas = [sorted(topology.get_axis_list("data", index)) for index in range(self.data_parallel_size)]
        self.ds_model_proc_group = own_group(replicas)
        self.ds_model_world_size = len(replicas[self.data_parallel_id])
        self.ds_model_rank = replicas[self.data_parallel_id].index(rank)

        self.dp_groups, self.pipe_groups = topology.get_axis_comm_lists("data"), topology.get_axis_comm_lists("pipe")
        self.dp_proc_group, self.pp_proc_group = own_group(self.dp_groups), own_group(self.pipe_groups)
        self.model_groups = topology.get_axis_comm_lists("model")
        self.dp_group, self.pp_group = _of(rank, self.dp_groups), _of(rank, self.pipe_groups)
        # DeepSpeed's names for the tensor-parallel ranks.
        vars(self).update(
            slice_parallel_size=self.model_parallel_size,
            slice_group=_of(rank, self.model_groups),
            slice_proc_group=tensor_parallel_group or own_group(self.model_groups),
        )


@contextmanager
def token_slice_grid(tensor_parallel_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Replace the grid that DeepSpeed's `PipelineModule` makes: it looks the class up in its own module."""
    original = deepspeed_module.PipelineParallelGrid
    deepspeed_module.PipelineParallelGrid = partial(TokenSliceGrid, tensor_parallel_group=tensor_parallel_group)
    try:
        yield
    finally:
        deepspeed_module.PipelineParallelGrid = original


def own_group(
    groups: Sequence[Sequence[int]], timeout: timedelta | None = None, *, max_ctas: int | None = None
) -> dist.ProcessGroup:
    """This rank's process group out of several that share no rank. Every rank must call it at the same time.

    `torch.distributed.new_group` makes one group and takes every rank of the world, also those outside the group:
    with NCCL each call splits the communicator of all ranks. Here all groups are made at once: NCCL splits the
    communicator of all ranks into all of them, and with other backends only the ranks of a group meet. A rank that is
    in none of the groups gets one of its own.

    Args:
        max_ctas: blocks of threads that NCCL may use at a time on this communicator; None = its own choice.
    """
    rank, members = dist.get_rank(), {rank for ranks in groups for rank in ranks}
    groups = [list(ranks) for ranks in groups] + [
        [each] for each in range(dist.get_world_size()) if each not in members
    ]
    own = _of(rank, groups)
    if not _names_agree():
        made = [dist.new_group(ranks, timeout=timeout, pg_options=_options(timeout, max_ctas)) for ranks in groups]
        return made[groups.index(own)]
    if _splits():
        return dist.split_group(split_ranks=groups, timeout=timeout, pg_options=_options(timeout, max_ctas))
    return dist.new_group(own, timeout=timeout, pg_options=_options(timeout, max_ctas), use_local_synchronization=True)


def _options(timeout: timedelta | None, max_ctas: int | None) -> Any:
    """Options of a new group: None for the defaults. Torch writes into them, so each group needs its own."""
    if max_ctas is None or dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options


def wait_as_long(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this rank, also of those that DeepSpeed makes."""
    # Public since torch 2.15, by another name.
    set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(timeout, group)


def _of(rank: int, groups: Iterable[list[int]]) -> list[int]:
    return next(ranks for ranks in groups if rank in ranks)


def _splits() -> bool:
    """Whether the communicator of all ranks can be split into several at once: NCCL's, on a device that is known."""
    device = dist.group.WORLD.bound_device_id
    return device is not None and dist.group.WORLD._get_backend(device).supports_splitting


def _names_agree() -> bool:
    """Whether all ranks would give a new group the same name.

    Torch names a group that is made without all ranks by its ranks and by the number of groups of a rank. `own_group`
    adds one on every rank. Groups of some ranks that are made otherwise may make these numbers differ, and ranks with
    two names of a group wait for ever. From 2.14 on the number of groups that a rank has ever made takes its place, and
    is also the name of a group that all ranks make. It need only be new: all ranks go on from the highest.
    """
    world = dist.distributed_c10d._world
    number = len(world.pg_names)
    on_host = dist.get_backend() in ("gloo", "fake")
    device = "cpu" if on_host else get_accelerator().current_device_name()
    bounds = torch.tensor([number, -number, world.group_count], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    most, least, world.group_count = bounds.tolist()
    return most == -least


def any_rank(mine: bool) -> bool:
    """Whether a condition is true on any rank; a collective operation of all ranks."""
    return last_rank(mine) >= 0


def last_rank(mine: bool) -> int:
    """Return the last rank on which a condition is true; -1 for none. A collective operation of all ranks."""
    rank, device = dist.get_rank() if mine else -1, get_accelerator().current_device_name()
    found = torch.tensor(rank, dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found.item())


Pending = Callable[[], Tensor]
"""A collective under way: call it to wait for the result."""

# Torch 2.13 renamed both, and warns of the names that older releases have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def pending(work: dist.Work, result: Callable[[], Tensor]) -> Pending:
    """Return a function that waits for a collective and returns its result."""

    def finish() -> Tensor:
        work.wait()
        return result()

    return finish


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that share a part of the work; by default a single rank. Tokens are in dimension 1 of their tensors."""

    rank: int = 0
    """Place of this rank among them."""
    size: int = 1
    group: dist.ProcessGroup | None = None
    """Their process group; None for a single rank."""

    def start_gather(self, part: Tensor) -> Pending:
        """Start to gather the tokens of all ranks: [B, N / size, C] to [B, N, C]."""
        part = part.contiguous()
        gathered = part.new_empty((self.size, *part.shape))
        work = all_gather(gathered.flatten(0, 1), part, group=self.group, async_op=True)
        # With one row the parts of the ranks are contiguous, and no copy is made.
        return pending(work, lambda: gathered.transpose(0, 1).flatten(1, 2))

    def start_reduce_scatter(self, whole: Tensor) -> Pending:
        """Start to sum a tensor over all ranks, of which each gets its tokens: [B, N, C] to [B, N / size, C]."""
        by_rank = whole.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        own = torch.empty_like(by_rank[0])
        return pending(reduce_scatter(own, by_rank.flatten(0, 1), group=self.group, async_op=True), lambda: own)

    def gather_tokens(self, own: Tensor) -> Tensor:
        """Return the tokens of all ranks, [B, N, C] for [B, N / size, C]. Backward, all ranks' gradients are summed."""
        return _GatherTokens.apply(own, self)


class _GatherTokens(torch.autograd.Function):
    """Megatron's f bar."""

    @staticmethod
    def forward(ctx, own, ranks: Ranks):
        ctx.ranks = ranks
        return ranks.start_gather(own)()

    @staticmethod
    def backward(ctx, of_all):
        return ctx.ranks.start_reduce_scatter(of_all)(), None


@dataclass(frozen=True, slots=True)
class SequenceParallelRanks(Ranks):
    """Ranks that share the tokens of every token slice between the matrices, and the heads in attention.

    Rank r of R has part r of each token slice.
    """

    @classmethod
    def of(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> "SequenceParallelRanks":
        """Return this rank's sequence-parallel ranks. Every rank must call it at the same time.

        Args:
            timeout: of head exchanges.
        """
        if layout.sequence_parallel_size == 1:
            return cls()
        own = layout.coordinate(dist.get_rank()).sequence
        return cls(own, layout.sequence_parallel_size, own_group(layout.groups("sequence"), timeout))

    def parts(self, token_slices: TokenSlices) -> TokenSlices:
        """Return the part of each token slice that this rank has."""
        return parts_of_rank(token_slices, self.rank, self.size)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors [...] of all these ranks, which must have one shape, by rank."""
        given = tensor if dist.get_backend(self.group) == "gloo" else tensor.to(get_accelerator().current_device_name())
        gathered = [torch.empty_like(given, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(gathered, given.contiguous(), group=self.group)
        return gathered


@dataclass(frozen=True, slots=True)
class ExpertParallelRanks(Ranks):
    """Ranks that share the experts of each layer: rank r of EP has experts r E / EP to (r + 1) E / EP (exclusive).

    They are ranks of one stage, which for DeepSpeed are data- or tensor-parallel:

        rank of the stage      0   1   2   3   4   5   6   7      two expert-parallel ranks: rank 0 has experts 0 and 1
        experts               01  23  01  23  01  23  01  23      copies of them: ranks 0, 2, 4 and 6

    A rank computes its experts for the tokens of all ranks of its block, so the gradient of a replica-averaged loss is
    the sum over the copies, divided by the number of copies of the other weights: data x sequence. Such weights have an
    attribute `expert_parallel`.

    DeepSpeed's own groups of experts are not used: its norm under ZeRO is a mean over the ranks with the same experts,
    each with another partition; in bf16 a stage without experts leaves the others waiting for its part of the norm.
    """

    copies: dist.ProcessGroup | None = None
    """The ranks of the stage with the same experts; None for a single expert-parallel rank."""

    @classmethod
    def of(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> "ExpertParallelRanks":
        """Return this rank's expert-parallel ranks. Every rank must call it at the same time."""
        size = layout.expert_parallel_size
        if size == 1:
            return cls()
        made = [own_group(layout.groups(axis), timeout) for axis in ("expert", "expert_copies")]
        return cls(dist.get_rank() % size, size, *made)


def is_of_experts(parameter: nn.Parameter) -> bool:
    """Whether a parameter has experts of which other expert-parallel ranks have others."""
    return getattr(parameter, "expert_parallel", False)
