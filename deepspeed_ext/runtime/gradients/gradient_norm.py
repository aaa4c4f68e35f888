"""The gradients of an optimizer's step: their global norm, clipping, and counts of bad and of zero elements."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from deepspeed_ext.runtime.clocks import UPDATE, Observer
from deepspeed_ext.runtime.topology import is_of_experts


def stepped_gradients(engine: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The gradients [...] of this rank's next optimizer step: whole, or under ZeRO 1 of its partition."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for weights, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            yield from zip(weights, gradients, strict=True)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group, weights in enumerate(optimizer.params_in_partition):
            # After the last weight the partition is padded.
            parts = (part for part in optimizer.averaged_gradients[group] if not hasattr(part, "_zero_padding"))
            yield from zip(weights, parts, strict=False)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                yield parameter, parameter.grad


def count_bad_copies(engine: Any) -> None:
    """Include NaN and infinite gradients of all copies in the norm, on each tensor-parallel rank.

    The norm includes only the first copy of weights that tensor parallelism does not cut, and each rank steps its own.
    Here 0 times the other copies is added to a gradient that counts: 0, or NaN.
    """
    if engine.grid.get_slice_parallel_rank() == 0:
        return
    counted, left_out = None, []
    for parameter, gradient in stepped_gradients(engine):
        if is_model_parallel_parameter(parameter) or is_of_experts(parameter):
            counted = gradient if counted is None else counted
        elif gradient.numel():
            left_out.append(gradient)
    if counted is not None and left_out:
        largest = torch.stack([each.to(counted.dtype) for each in torch._foreach_norm(left_out, float("inf"))])
        counted.view(-1)[:1].add_(largest.sum() * 0)


def _counts_here(parameter: nn.Parameter, tensor_parallel_rank: int) -> bool:
    """Whether a parameter counts on this rank: of copies on pipeline or tensor-parallel ranks only the first does."""
    replicated = getattr(parameter, "ds_pipe_replicated", False)
    is_cut = is_model_parallel_parameter(parameter) or is_of_experts(parameter)
    return not replicated and (tensor_parallel_rank == 0 or is_cut)


def _norm(gradient: Tensor) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient, dtype=wide).double()


def sum_over_model(engine: Any, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum [] of a measure of all gradients of a model, each weight counted once, in fp64; a collective of all ranks."""
    sums = torch.zeros(2, dtype=torch.double, device=engine.device)
    for parameter, gradient in stepped_gradients(engine):
        if _counts_here(parameter, engine.grid.get_slice_parallel_rank()):
            sums[int(is_of_experts(parameter))] += measure(gradient).double()
    dist.all_reduce(sums)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return sums.sum()
    layout = engine.module.topology().layout
    # Every copy counts, so that a bad one is found.
    return sums[0] / layout.num_weight_copies + sums[1] / layout.num_expert_copies


def global_norm(engine: Any) -> Tensor:
    """2-norm [] of the gradients of a whole model, in fp64, on its device; a collective of all ranks.

    DeepSpeed's own norm for fp32 without ZeRO counts the first stage only.
    """
    return sum_over_model(engine, lambda gradient: _norm(gradient) ** 2).sqrt()


def join_norms(engine: Any) -> None:
    """Replace the norms of DeepSpeed's optimizers where they do not count every weight once."""
    optimizer = engine.optimizer
    if engine.module.expert_ranks.size == 1:
        _join_norms_of_all_groups(engine)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):

        def scaled_global_norm(norm_type: int = 2) -> Tensor:
            norm = global_norm(engine).float()
            return torch.where(norm.isfinite(), norm, -1.0)  # As theirs.

        optimizer.scaled_global_norm = scaled_global_norm
    elif isinstance(optimizer, BF16_Optimizer):
        clipped, group = optimizer.get_grads_for_norm, engine.grid.get_model_parallel_group()

        def get_grads_for_norm(for_clipping: bool = False) -> Any:
            # Of these the norm over the ranks of a replica is computed.
            is_first = dist.get_rank(group) == 0
            return clipped(True) if for_clipping else ([global_norm(engine) * is_first], {})

        optimizer.get_grads_for_norm = get_grads_for_norm


def _join_norms_of_all_groups(engine: Any) -> None:
    """Let this rank take part in the norms of parameter groups that only other stages have.

    DeepSpeed's ZeRO sums a norm over all stages for each of its groups, and a stage may have fewer: one that holds the
    embedding only has no biases and norms, which do not decay. A collective operation of all ranks.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    own = len(optimizer.bit16_groups)
    most = torch.tensor(own, device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=engine.grid.get_model_parallel_group())
    absent, norm_of_own = range(own, int(most.item())), optimizer.scaled_global_norm

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        # Empty groups for so long: the sums then have the order of the other stages, and the norm has their bits.
        for group in absent:
            optimizer.bit16_groups.append([])
            optimizer.params_in_partition.append([])
            optimizer.averaged_gradients[group] = []
        try:
            return norm_of_own(norm_type)
        finally:
            del optimizer.bit16_groups[own:], optimizer.params_in_partition[own:]
            for group in absent:
                del optimizer.averaged_gradients[group]

    if absent:
        optimizer.scaled_global_norm = scaled_global_norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down, in place, if the norm [] of the whole model is above `max_norm`.

    The host does not read the norm: gradients within the limit are multiplied by 1.
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)


def skip_bad_update(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Skip the next step of an optimizer, if the norm [] of all gradients is NaN or infinite.

    DeepSpeed's other optimizers do so themselves. Fused steps are skipped on the device, without a wait of the host;
    with others it waits, and removes the gradients, without which no optimizer of torch updates a weight.
    """
    is_bad = ~torch.isfinite(norm)
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = is_bad.to(torch.float32)
    elif is_bad.item():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class ZeroGradients(Observer):
    """Number of zeros in the gradient of the whole model, between reductions and clipping of each step.

    Weights that pipeline ranks share count once, and so do parameters that every tensor-parallel rank has.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._found = engine, torch.zeros(())

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count before the update; a collective of all ranks."""
        if name == UPDATE:
            self._found = sum_over_model(self._engine, lambda each: each.numel() - torch.count_nonzero(each))
        return nullcontext()

    def number(self) -> int:
        """Zeros of the last step; the host waits for it only here."""
        return int(self._found.item())
