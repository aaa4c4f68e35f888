"""The places where DeepSpeed's optimizers read the sums of gradients over the replicas, and the ranks that need them.

- Of torch's own optimizer, which is that of fp32 without ZeRO, every replica needs all of `parameter.grad`.
- `BF16_Optimizer` has a flat buffer of gradients for each group of parameters. Every replica needs all of it, though it
  steps a part: the norm is taken of whole gradients.
- Of ZeRO 1 a replica needs those of `parameter.grad` that its partition of the optimizer's state is for.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from deepspeed_ext.runtime.gradients.gradient_sums import accumulated_gradient


class Part(NamedTuple):
    """A flat part of a gradient."""

    values: Tensor
    """[n], a view of where the gradient adds up."""
    owner: int | None = None
    """Rank in the data-parallel group that alone needs the sum; None if every one does."""


class ReplicaGradients(Protocol):
    """Gradients of one way to run an optimizer.

    Attributes:
        communication_type: dtype in which they are sent.
    """

    group: dist.ProcessGroup
    """The replicas of this rank."""
    in_flat_buffers: bool
    """Whether they lie one behind the other in few buffers, in one order on all replicas. Those of a buffer share its
    version counter."""

    @property
    def communication_type(self) -> torch.dtype:
        """Type of the messages, by the settings."""

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring what the backward that runs now has left of some parameters to where their gradients add up."""

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        """The gradient of a parameter; zeros if it has none, so that every replica can join in."""

    def scale_before(self, values: Tensor) -> None:
        """Scale gradients [elements] that are about to be summed, in place."""

    def scale_after(self, values: Tensor) -> None:
        """Scale a sum [elements], in place."""

    def finish(self) -> None:
        """Tell the optimizer that all sums are there."""


def replica_gradients(engine: Any) -> ReplicaGradients | None:
    """The gradients of an engine.

    Returns:
        None if there is one replica, or the settings ask for reductions that only DeepSpeed knows: of experts, of
        sparse gradients, and ZeRO's of buckets that its own hooks fill.
    """
    special = engine.has_moe_layers or any(getattr(layer, "sparse", False) for layer in engine.module.modules())
    if engine.dp_world_size == 1 or special or not engine.pipeline_enable_backward_allreduce:
        return None
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return _Bf16(engine)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        hooked = optimizer.contiguous_gradients or optimizer.overlap_comm or optimizer.use_grad_accum_attribute
        return None if hooked or optimizer.cpu_offload or optimizer.partition_gradients else _Partitioned(engine)
    return _Whole(engine) if isinstance(optimizer, torch.optim.Optimizer) else None


class _Whole:
    """Gradients of parameters, needed by every replica."""

    in_flat_buffers = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.group = engine.grid.get_data_parallel_group()
        size, self._averages = dist.get_world_size(self.group), engine.gradient_average
        predivided = engine.gradient_predivide_factor() if engine.postscale_gradients() else size
        # The same factors as DeepSpeed's, computed as it computes them, so that the same bits come out.
        self._before, self._after = 1.0 / predivided, predivided / size

    @property
    def communication_type(self) -> torch.dtype:
        """Type of the messages, by the settings."""
        return self._engine.communication_data_type

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Autograd has left gradients where they add up."""

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        """The whole gradient."""
        yield Part(_flat(parameter))

    def scale_before(self, values: Tensor) -> None:
        """Divide what was asked to be divided before it is summed."""
        if self._averages and self._before != 1:
            values.mul_(self._before)

    def scale_after(self, values: Tensor) -> None:
        """Make a mean of a sum."""
        if self._averages and self._after != 1:
            values.mul_(self._after)

    def finish(self) -> None:
        """Do nothing; nothing is left to do."""


class _Bf16(_Whole):
    """Gradients in the flat buffers of `BF16_Optimizer`, to which each backward's bf16 gradients are added."""

    in_flat_buffers = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._optimizer = engine.optimizer
        groups = enumerate(self._optimizer.bf16_groups)
        self._places = {weight: (group, index) for group, weights in groups for index, weight in enumerate(weights)}

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add what the backward has left so far; it is then not added again at its end."""
        if self._optimizer.immediate_grad_update:
            return
        with torch.no_grad():
            for parameter in parameters:
                self._optimizer._update_hp_grad(parameter, *self._places[parameter], clear_lp_grads=False)
                parameter.grad = None

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        """The whole gradient."""
        group, index = self._places[parameter]
        yield Part(self._optimizer.fp32_groups_gradients[group][index])


class _Partitioned:
    """Gradients of which each replica needs those that its partition of the optimizer's state is for."""

    in_flat_buffers = False

    def __init__(self, engine: Any) -> None:
        optimizer = self._optimizer = engine.optimizer
        self.group = optimizer.dp_process_group
        self._size = dist.get_world_size(self.group)
        groups = enumerate(optimizer.round_robin_bit16_groups)
        self._groups = {weight: group for group, weights in groups for weight in weights}

    @property
    def communication_type(self) -> torch.dtype:
        """Type of the messages, by the settings."""
        return self._optimizer.communication_data_type

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Autograd has left gradients where they add up."""

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        """The parts of a gradient, each with its owner."""
        optimizer, gradient = self._optimizer, _flat(parameter)
        if not optimizer.reduce_scatter:
            yield Part(gradient)
            return
        group, number = self._groups[parameter], optimizer.get_param_id(parameter)
        owners = optimizer.param_to_partition_ids[group][number]
        starts = sorted((int(optimizer.grad_start_offset[group][owner][number]), owner) for owner in owners)
        ends = [*(start for start, _ in starts[1:]), gradient.numel()]
        for (start, owner), end in zip(starts, ends, strict=True):
            yield Part(gradient[start:end], owner)

    def scale_before(self, values: Tensor) -> None:
        """Make what is summed add up to a mean."""
        if self._optimizer.gradient_average:
            values.div_(self._size)

    def scale_after(self, values: Tensor) -> None:
        """A sum is a mean already."""

    def finish(self) -> None:
        """Let ZeRO take its partition of the gradients."""
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = accumulated_gradient(parameter)
    if not gradient.is_contiguous():
        gradient = parameter.grad = gradient.contiguous()
    return gradient.view(-1)
