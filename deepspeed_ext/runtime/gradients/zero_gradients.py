"""How many numbers of a model's gradient are exactly zero, each counted once."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.runtime.gradients.stepped_gradients import stepped_gradients
from deepspeed_ext.runtime.ledger.observers import UPDATE


class ZeroGradients:
    """Counts the zeros of each step, before clipping. An `Observer`."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._found = engine, torch.zeros(())

    def begin(self) -> None:
        """A batch begins."""

    def op(self, op: Op) -> AbstractContextManager[None]:
        """Let an op be."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count before the update."""
        if name == UPDATE:
            self._found = num_zero_gradients(self._engine)
        return nullcontext()

    def number(self) -> int:
        """Zeros of the last step; the host waits for it only here."""
        return int(self._found.item())


def num_zero_gradients(engine: Any) -> Tensor:
    """Zeros in the gradient of the whole model [], between the reductions and the step; every rank must ask.

    Weights that pipeline ranks share count once, and so do parameters that every tensor-parallel rank holds.
    """
    first_of_tensor_parallel = engine.grid.get_slice_parallel_rank() == 0
    zeros = torch.zeros((), dtype=torch.int64, device=engine.device)
    for parameter, gradient in stepped_gradients(engine):
        replicated = getattr(parameter, "ds_pipe_replicated", False)
        if not replicated and (first_of_tensor_parallel or is_model_parallel_parameter(parameter)):
            zeros += gradient.numel() - torch.count_nonzero(gradient)
    dist.all_reduce(zeros, group=engine.grid.get_model_parallel_group())
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        dist.all_reduce(zeros, group=engine.grid.get_data_parallel_group())
    return zeros
