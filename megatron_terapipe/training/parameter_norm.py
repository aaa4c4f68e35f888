"""The norm of all parameters of a model that lies on many ranks."""

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine


def parameter_norm(engine: TokenSlicePipelineEngine) -> float:
    """2-norm of the parameters, each counted once; every rank must ask.

    Tied weights stand on several stages, and what tensor parallelism does not cut on each of its ranks.
    """
    first_of_tensor_parallel = engine.grid.get_slice_parallel_rank() == 0
    squares = torch.zeros((), dtype=torch.float64, device=engine.device)
    engine.complete_weights()
    with torch.no_grad():
        for parameter in engine.module.parameters():
            replicated = getattr(parameter, "ds_pipe_replicated", False)
            if not replicated and (first_of_tensor_parallel or is_model_parallel_parameter(parameter)):
                squares += torch.linalg.vector_norm(parameter.float()).double() ** 2
    dist.all_reduce(squares, group=engine.grid.get_model_parallel_group())
    return squares.sqrt().item()
