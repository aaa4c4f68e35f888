"""The norm of a gradient that lies on many ranks, each part counted once."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn


def global_grad_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, *, tensor_parallel_rank: int
) -> Tensor:
    """2-norm of the gradients of a whole model.

    Counted once are weights that pipeline ranks share, and parameters that every tensor-parallel rank holds.
    DeepSpeed's own norm for fp32 without ZeRO counts the first stage alone.

    Args:
        tensor_parallel_rank: this rank's place on the tensor axis.

    Returns:
        A scalar in fp64, on the device of the parameters.
    """
    parameters = list(parameters)
    counted = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None
        and not getattr(parameter, "ds_pipe_replicated", False)
        and (tensor_parallel_rank == 0 or is_model_parallel_parameter(parameter))
    ]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in counted
    ]
    # Every rank takes part in the sum, also one that owns none of the counted gradients; fp64 holds any of them.
    nothing = torch.zeros((), dtype=torch.double, device=parameters[0].device)
    squares = torch.stack([norm.double() ** 2 for norm in norms]).sum() if norms else nothing
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down if the norm of the whole model is above `max_norm`.

    The host does not read the norm: gradients within the limit are multiplied by 1.

    Args:
        parameters: parameters whose gradients [...] are scaled in place.
        norm: norm of all gradients of the model: [].
    """
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(coefficient)


def hold_back_bad_update(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Let the next step of an optimizer change nothing, if the norm of its gradient is no number.

    DeepSpeed's other optimizers do so themselves. Fused steps skip on the device, and the host need not wait for the
    norm; with others it does, and takes away the gradients, without which no optimizer of torch updates a weight.

    Args:
        norm: norm of all gradients of the model: [].
    """
    is_bad = ~torch.isfinite(norm)
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = is_bad.to(torch.float32)
    elif is_bad.item():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
