"""Saving and loading of a model of which each pipeline rank has a part."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.gradients.stepping import SteppingEngine
from deepspeed_ext.runtime.saved_files import only_safe_files


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
