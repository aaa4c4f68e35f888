"""DeepSpeed's pipeline engine over the layouts of this package: sizes, data, norms, updates and checkpoints.

DeepSpeed regards all ranks with the same weights as readers of different data, so it counts every sequence once on
each sequence-parallel rank. A user's configuration, and all sizes that the engine reports, count it once:

    train_batch_size = micro-batch size x micro-batches x data-parallel size
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import ROUTE_TRAIN
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import RepeatingLoader
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.gradients.gradient_norm import (
    clip_gradients,
    count_bad_copies,
    global_norm,
    join_norms,
    skip_bad_update,
)
from deepspeed_ext.runtime.gradients.parameter_gathers import ParameterGathers, parameter_gathers
from deepspeed_ext.runtime.gradients.reductions import (
    GradientReductions,
    gradient_reductions,
    sum_over_sharing_ranks,
    sum_over_tensor_parallel_ranks,
)
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.saved_files import gathered_by_first_rank, only_safe_files
from deepspeed_ext.runtime.topology import is_of_experts


class AdaptedPipelineEngine(PipelineEngine):
    """DeepSpeed's engine, without a schedule of its own. Arguments are explained in `initialize`."""

    module: TokenSlicePipelineModule

    # Class attributes, since the constructor of `PipelineEngine` reads them.
    _reductions: GradientReductions | None = None
    """Sums over replicas that start while backwards run."""
    _gathers: ParameterGathers | None = None
    """Gathers of weights that run under the next forward."""
    _curr_ckpt_path: str | None = None
    """Where DeepSpeed saves to or loads from at the moment."""

    def __init__(
        self, *arguments: Any, overlap_grad_reduce: bool = True, overlap_param_gather: bool = False, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        assert isinstance(self.module, TokenSlicePipelineModule), "made for a TokenSlicePipelineModule"
        self._count_sequences()
        self.tput_timer.batch_size = self.train_batch_size()
        join_norms(self)
        self._overlaps_reductions = overlap_grad_reduce
        shares_experts = self.module.expert_ranks.size > 1
        self._reductions = gradient_reductions(self) if overlap_grad_reduce or shares_experts else None
        self._gathers = parameter_gathers(self) if overlap_param_gather else None

    # ------------------------------------------------------------------ batch sizes and data

    @property
    def num_replicas(self) -> int:
        """Data-parallel size: groups of ranks that read different data."""
        return self.module.topology().layout.data_parallel_size

    @property
    def replica(self) -> int:
        """Number of this rank's replica: the same on all ranks that read the same data."""
        return self.module.topology().layout.coordinate(self.global_rank).data

    @property
    def computes_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self.module.pipeline.rank_of(self.module.pipeline.last_stage) == self.stage_id

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads the data iterator."""
        return self.stage_id in self.module.reading_ranks

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size, by another number of micro-batches."""
        super().set_train_batch_size(train_batch_size * self.module.sequence_ranks.size)
        self._count_sequences()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, and with it the global batch size."""
        super().set_train_micro_batch_size(micro_batch_size)
        self._count_sequences()

    def _count_sequences(self) -> None:
        self._config.train_batch_size //= self.module.sequence_ranks.size

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Read from another iterator, on ranks that read data."""
        self.data_iterator = iterator if self.reads_data else None

    @contextmanager
    def _reading(self, iterator: Iterator[Any]) -> Iterator[None]:
        """Read from another iterator inside."""
        before = self.data_iterator
        self.set_dataiterator(iterator)
        try:
            yield
        finally:
            self.set_dataiterator(before)

    def deepspeed_io(
        self, dataset: Dataset, batch_size: int | None = None, route: str = ROUTE_TRAIN, **keywords: Any
    ) -> Any:
        """Return a loader of a dataset, by which all ranks of a replica read the same samples."""
        shared = self.module.sequence_ranks.size > 1 and not isinstance(dataset, IterableDataset)
        if shared and keywords.get("data_sampler") is None:
            keywords["data_sampler"] = self._sampler(dataset, shuffle=route == ROUTE_TRAIN)
        return super().deepspeed_io(dataset, batch_size, route, **keywords)

    def _build_data_iter(self, dataset: Dataset) -> None:
        loader = self.deepspeed_io(dataset, data_sampler=self._sampler(dataset, shuffle=False))
        self.set_dataloader(RepeatingLoader(loader))

    def _sampler(self, dataset: Dataset, *, shuffle: bool) -> DistributedSampler:
        return DistributedSampler(dataset, self.num_replicas, self.replica, shuffle=shuffle)

    # ------------------------------------------------------------------ the optimizer step

    def _broadcast_model(self) -> None:
        if self.module.expert_ranks.size == 1:
            super()._broadcast_model()
            return
        for parameter in self.module.parameters():
            group = self.module.expert_ranks.copies if is_of_experts(parameter) else self.seq_data_parallel_group
            # As bytes, since not every backend has all types.
            dist.broadcast(parameter.data.view(torch.uint8), group=group, group_src=0)

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        with _experts_apart(self, optimizer):
            return super()._configure_bf16_optimizer(optimizer)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        with _experts_apart(self, optimizer):
            return super()._configure_zero_optimizer(optimizer)

    def complete_weights(self) -> None:
        """Wait for pending gathers of weights; call it before weights are read outside a batch or state dict."""
        if self._gathers is not None:
            self._gathers.finish()

    def _exec_reduce_tied_grads(self) -> None:
        """Sum the gradients of which several ranks of one replica have a part."""
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
            # Other optimizers of DeepSpeed compute the norm themselves.
            self._global_grad_norm = global_norm(self)
            skip_bad_update(self.optimizer, self._global_grad_norm)
        with nullcontext() if self._gathers is None else self._gathers.deferred():
            super()._exec_optimizer_step(lr_kwargs)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradients of the last step; the host waits for it only here."""
        norm = super().get_global_grad_norm()
        return norm.item() if torch.is_tensor(norm) else norm

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights: not if its gradient had a NaN or an infinity."""
        norm = self._global_grad_norm
        return super().was_step_applied() and not (torch.is_tensor(norm) and not norm.isfinite().item())

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that the norm of the whole model's is at most the configured one."""
        clip_gradients(self.module.parameters(), self._global_grad_norm, self.gradient_clipping())

    # ------------------------------------------------------------------ checkpoints

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        """Load a checkpoint, the latest if `tag` is None, as DeepSpeed's engines do.

        Returns:
            `(path, client_state)`, both None if there is no latest one.
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

        None while a checkpoint is saved, which has a file for each layer instead.
        """
        if self._curr_ckpt_path is not None:
            return super().module_state_dict(exclude_frozen_parameters)
        self.complete_weights()
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module.state_dict().items() if name not in left_out}

    def _copy_recovery_script(self, save_path: str) -> None:
        """Copy no script: DeepSpeed's scripts cannot join the stages of a pipeline."""

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights of all pipeline ranks in one file, in their own types. Every rank must call it."""
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


@contextmanager
def _experts_apart(engine: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around the construction of DeepSpeed's optimizer: it partitions experts over the ranks with the same ones."""
    copies = engine.module.expert_ranks.copies
    if not any(map(is_of_experts, engine.module.parameters())):
        yield
        return
    for group in list(optimizer.param_groups):
        experts = [weight for weight in group["params"] if is_of_experts(weight)]
        if 0 < len(experts) < len(group["params"]):
            group["params"] = [weight for weight in group["params"] if not is_of_experts(weight)]
            optimizer.param_groups.append({**group, "params": experts})

    def configure(made: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            if is_of_experts(group["params"][0]):
                made.real_dp_process_group[number] = copies
                if isinstance(made, DeepSpeedZeroOptimizer):
                    made.partition_count[number] = dist.get_world_size(copies)
        made.has_moe_layers = False  # For all that follows.

    # Constructors with experts call it before they partition weights.
    originals = {kind: kind._configure_moe_settings for kind in (BF16_Optimizer, DeepSpeedZeroOptimizer)}
    engine.has_moe_layers = True
    for kind in originals:
        kind._configure_moe_settings = configure
    try:
        yield
    finally:
        engine.has_moe_layers = False
        for kind, original in originals.items():
            kind._configure_moe_settings = original
