"""DeepSpeed's pipeline engine with our batch sizes, our optimizer step and our checkpoints: bases of the engine.

    PipelineEngine <- BatchSizesEngine <- SteppingEngine <- SavingEngine <- ReplayingEngine <- TokenSlicePipelineEngine
    (DeepSpeed)       sequences counted   end of a batch    checkpoints     `replay.py`        `engine.py`

DeepSpeed takes all ranks with the same weights for readers of data of their own, so that it counts every sequence once
on each sequence-parallel rank. A user's configuration, and all sizes that the engine reports, count it once:

    train_batch_size = micro-batch size x micro-batches x data-parallel size
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.pipe import schedule as deepspeed_schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import RepeatingLoader
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.clocks import REDUCTIONS, SUMS, UPDATE, Observers
from deepspeed_ext.runtime.gradients.gradient_norm import (
    clip_gradients,
    count_bad_copies,
    global_grad_norm,
    hold_back_bad_update,
)
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers
from deepspeed_ext.runtime.gradients.reductions import (
    GradientReductions,
    sum_over_sharing_ranks,
    sum_over_tensor_parallel_ranks,
)
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.saved_files import only_safe_files

_TRAIN, _MICRO, _COUNT = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def for_deepspeed(settings: Mapping[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    """Return a DeepSpeed configuration whose global batch size counts sequences as DeepSpeed does.

    Raises:
        UserError: if the sizes contradict each other.
    """
    size, factors = settings.get(_TRAIN), [settings[name] for name in (_MICRO, _COUNT) if name in settings]
    if not isinstance(size, int) or not all(isinstance(each, int) and each > 0 for each in factors):
        return dict(settings)  # DeepSpeed says what is missing or wrong.
    replicas = layout.data_parallel_size
    least = prod(factors) * replicas
    fits = size == least if len(factors) == 2 else not size % least
    if not fits:
        named = " x ".join(f"{name} {settings[name]}" for name in (_MICRO, _COUNT) if name in settings)
        raise UserError(
            f"{_TRAIN} {size} does not fit {named or 'one sequence'} x data-parallel size {replicas} = {least}: "
            "change one of them; ranks that share a sequence do not count"
        )
    return {**settings, _TRAIN: size * layout.sequence_parallel_size}


class BatchSizesEngine(PipelineEngine):
    """DeepSpeed's pipeline engine, whose batch sizes count sequences. Arguments are those of `PipelineEngine`."""

    module: TokenSlicePipelineModule

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._count_sequences()
        self.tput_timer.batch_size = self.train_batch_size()

    @property
    def num_replicas(self) -> int:
        """Data-parallel size: groups of ranks that read data of their own."""
        return self.module.topology().layout.data_parallel_size

    @property
    def replica(self) -> int:
        """Number of this rank's replica: the same on all ranks that read the same data."""
        return self.module.topology().layout.coordinate(self.global_rank).data

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size, by another number of micro-batches.

        Raises:
            ValueError: if it is no multiple of the micro-batch size times the data-parallel size.
        """
        super().set_train_batch_size(train_batch_size * self.module.sequence_ranks.size)
        self._count_sequences()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size."""
        super().set_train_micro_batch_size(micro_batch_size)
        self._count_sequences()

    def deepspeed_io(
        self, dataset: Dataset, batch_size: int | None = None, route: str = ROUTE_TRAIN, **keywords: Any
    ) -> Any:
        """Return a loader of a dataset, by which all ranks of a replica read the same samples.

        Args:
            batch_size: samples of a micro-batch; None for those of training.
            route: what they are for, by DeepSpeed's names.
        """
        shared = self.module.sequence_ranks.size > 1 and not isinstance(dataset, IterableDataset)
        if shared and keywords.get("data_sampler") is None:
            keywords["data_sampler"] = self._sampler(dataset, shuffle=route == ROUTE_TRAIN)
        return super().deepspeed_io(dataset, batch_size, route, **keywords)

    def _build_data_iter(self, dataset: Dataset) -> None:
        loader = self.deepspeed_io(dataset, data_sampler=self._sampler(dataset, shuffle=False))
        self.set_dataloader(RepeatingLoader(loader))

    def _sampler(self, dataset: Dataset, *, shuffle: bool) -> DistributedSampler:
        return DistributedSampler(dataset, self.num_replicas, self.replica, shuffle=shuffle)

    def _count_sequences(self) -> None:
        self._config.train_batch_size //= self.module.sequence_ranks.size


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


class SavingEngine(SteppingEngine):
    """DeepSpeed's pipeline engine, with what DeepSpeed's other engines can save."""

    _curr_ckpt_path: str | None = None
    """Where DeepSpeed saves to or loads from at the moment."""

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Load a checkpoint, as DeepSpeed's engines do.

        Args:
            tag: name of one of them; None for the latest.

        Returns:
            `(path, client_state)`, both None if there is no latest one.

        Raises:
            UserError: if there is no checkpoint of that name, or a file of it names what could run a program.
        """
        directory = Path(load_dir)
        if tag is not None and not (directory / tag).is_dir():
            names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
            raise UserError(
                f"{directory} has no checkpoint {tag!r}, but {', '.join(names) or 'none at all'}: give one of its tags"
            )
        try:
            with only_safe_files(directory if tag is None else directory / tag):
                return super().load_checkpoint(load_dir, tag, *arguments, **keywords)
        finally:
            self._curr_ckpt_path = None

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Weights and buffers of this rank's layers, by name.

        Returns:
            The state dict; None while a checkpoint is saved, which has a file for each layer instead.
        """
        if self._curr_ckpt_path is not None:
            return super().module_state_dict(exclude_frozen_parameters)
        self.complete_weights()
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module.state_dict().items() if name not in left_out}

    def _copy_recovery_script(self, save_path: str) -> None:
        """Copy no script beside a checkpoint: DeepSpeed's scripts put no stages of a pipeline together."""

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights of all pipeline ranks in one file, in the type that they have. Every rank must call it.

        Returns:
            True.

        Raises:
            UserError: if tensor-parallel ranks have parts of weights.
        """
        if self.grid.get_slice_parallel_world_size() > 1:
            raise UserError(
                "save_16bit_model writes whole weights, and tensor-parallel ranks have parts of them: save_checkpoint"
            )
        whole = gathered_by_first_rank(self, self.module_state_dict(exclude_frozen_parameters))
        if whole is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(whole, Path(save_dir) / save_filename)
        dist.barrier()
        return True


def gathered_by_first_rank(engine: PipelineEngine, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Tensors of all pipeline ranks, by name, on the CPU; of a name that several have, those of the first.

    Args:
        engine: engine of this rank; every rank must call this.
        own: tensors of this rank, of any shapes: scalars, [rows, columns] and so on.

    Returns:
        The tensors on rank 0; None on all others.
    """
    if engine.grid.get_data_parallel_rank() > 0:
        return None
    group, first = engine.grid.get_pipe_parallel_group(), engine.grid.stage_to_global(0)
    on_cpu = {name: value.detach().cpu() if torch.is_tensor(value) else value for name, value in own.items()}
    parts: list[Any] | None = None
    if engine.global_rank == first:
        parts = [None] * dist.get_world_size(group)
    dist.gather_object(on_cpu, parts, dst=first, group=group)
    if parts is None:
        return None
    return {name: value for part in reversed(parts) for name, value in part.items()}
