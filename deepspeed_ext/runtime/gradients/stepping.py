"""The end of a batch: gradients are completed over ranks, clipped, and stepped on."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from deepspeed_ext.runtime.batches.batch_sizes import BatchSizesEngine
from deepspeed_ext.runtime.gradients.grad_norm import clip_gradients, global_grad_norm, hold_back_bad_update
from deepspeed_ext.runtime.gradients.gradient_reductions import GradientReductions
from deepspeed_ext.runtime.gradients.gradient_sums import sum_over_sharing_ranks, sum_over_tensor_parallel_ranks
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.stepped_gradients import count_bad_copies
from deepspeed_ext.runtime.ledger.observers import REDUCTIONS, SUMS, UPDATE, Observers
from deepspeed_ext.runtime.ledger.op_ledger import OpLedger

_WORDS = {
    SUMS: "sums over the ranks of a replica",
    REDUCTIONS: "sums over replicas",
    UPDATE: "norm, clipping and update",
}
"""What the ledger calls each phase."""


def _phase(name: str, method: Callable[["SteppingEngine"], None]) -> Callable[..., None]:
    @wraps(method)
    def execute(engine: "SteppingEngine") -> None:
        with engine.observers.phase(name), engine.ledger.phase(_WORDS[name]):
            method(engine)

    return execute


class SteppingEngine(BatchSizesEngine):
    """DeepSpeed's pipeline engine, with our sums of gradients and gathers of weights around its optimizers' step."""

    observers: Observers
    """Observers of the ops and phases of a step."""
    ledger: OpLedger
    """What this rank has done and does."""
    _reductions: GradientReductions | None = None
    """Sums over replicas that start while backwards run."""
    _gathers: ParameterGathers | None = None
    """Gathers of weights that run under the next forward."""

    def complete_weights(self) -> None:
        """Wait for weights that are still gathered; to be called before they are read outside a batch or state dict."""
        if self._gathers is not None:
            self._gathers.finish()

    def _exec_reduce_tied_grads(self) -> None:
        """Complete the gradients of which several ranks of one replica hold a part."""
        sum_over_tensor_parallel_ranks(self.module, self.grid)
        sum_over_sharing_ranks(self.module.get_tied_weights_and_groups())

    def _exec_reduce_grads(self) -> None:
        if self._reductions is not None:
            self._reductions.finish(self.module.parameters())
        # DeepSpeed would copy every gradient even where there is no other replica to reduce with.
        elif self.is_data_parallel or self.zero_optimization():
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        count_bad_copies(self)
        if not (self.fp16_enabled() or self.bfloat16_enabled() or self.zero_optimization()):
            # The other optimizers of DeepSpeed compute the norm themselves.
            self._global_grad_norm = global_grad_norm(
                self.module.parameters(),
                self.grid.get_model_parallel_group(),
                tensor_parallel_rank=self.grid.get_slice_parallel_rank(),
            )
            hold_back_bad_update(self.optimizer, self._global_grad_norm)
        with nullcontext() if self._gathers is None else self._gathers.deferred():
            super()._exec_optimizer_step(lr_kwargs)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradients of the last step; the host waits for it only here."""
        norm = super().get_global_grad_norm()
        return norm.item() if torch.is_tensor(norm) else norm

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights: not if its gradient was no number."""
        norm = self._global_grad_norm
        return super().was_step_applied() and not (torch.is_tensor(norm) and not norm.isfinite().item())

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that the norm of the whole model's is at most the configured one."""
        clip_gradients(self.module.parameters(), self._global_grad_norm, self.gradient_clipping())

    # DeepSpeed calls the functions in this table, not the methods of their names: an override must be listed.
    _INSTRUCTION_MAP = {  # noqa: RUF012
        **BatchSizesEngine._INSTRUCTION_MAP,
        deepspeed_schedule.ReduceTiedGrads: _phase(SUMS, _exec_reduce_tied_grads),
        deepspeed_schedule.ReduceGrads: _phase(REDUCTIONS, _exec_reduce_grads),
        deepspeed_schedule.OptimizerStep: _phase(UPDATE, _exec_optimizer_step),
    }
