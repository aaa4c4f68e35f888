"""Checkpoints: DeepSpeed's files, and beside them what the run was.

CHECKPOINTS/latest                       tag of the newest whole checkpoint, written last
CHECKPOINTS/global_step100/run.json      iteration, model, layout, tokenizer: read before any process group
CHECKPOINTS/global_step100/layer_00-...  weights, a file per layer, whatever stage it was on
CHECKPOINTS/global_step100/...           optimizer state
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.config import CheckpointConfig, ModelConfig
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.model.gpt import layers_with_weights

_MAY_CHANGE = {"seq_length", "init_method_std"}
"""Settings of the model that do not change the shape of a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says of its run.

    Attributes:
        iteration: iterations done.
        consumed_samples: samples trained on.
        model: the model section, vocabulary size included.
        layout: sizes of the parallel axes.
        zero_stage: ZeRO stage, by which the optimizer's files are cut.
        tokenizer: type and files of the tokenizer.
    """

    iteration: int
    consumed_samples: int
    model: dict[str, Any]
    layout: dict[str, int]
    zero_stage: int
    tokenizer: dict[str, str | None]

    @classmethod
    def read(cls, directory: Path) -> "CheckpointInfo":
        """Read it from one checkpoint's directory.

        Raises:
            CheckpointError: if it is missing or broken.
        """
        path = directory / "run.json"
        try:
            found = json.loads(path.read_text())
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {directory} has no readable run.json ({error}): load one that this trainer saved whole"
            ) from None

    def write(self, directory: Path) -> None:
        """Write it into a checkpoint's directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    def check(self, model: ModelConfig, layout: ParallelLayout, zero_stage: int, *, weights_only: bool) -> None:
        """Hold a checkpoint against the run that wants to load it.

        Raises:
            CheckpointError: if a weight would have another shape or, unless only weights are loaded, the optimizer's
                state would be cut in another way.
        """
        ours = asdict(model)
        for name, theirs in self.model.items():
            if name not in _MAY_CHANGE and ours.get(name) != theirs:
                flag = "--" + name.replace("_", "-")
                raise CheckpointError(
                    f"the checkpoint has {flag} {theirs}, this run {ours.get(name)}: "
                    f"set {flag} {theirs}, or load another checkpoint"
                )
        if weights_only:
            return
        for axis in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(layout, axis) != self.layout[axis]:
                raise CheckpointError(
                    f"the checkpoint's optimizer state is cut for {axis} {self.layout[axis]}, this run has "
                    f"{getattr(layout, axis)}: launch as it was saved, or load the weights alone with --no-load-optim"
                )
        if zero_stage != self.zero_stage:
            raise CheckpointError(
                f"the checkpoint's optimizer state is of ZeRO stage {self.zero_stage}, this run is stage {zero_stage}: "
                f"set --zero-stage {self.zero_stage}, or load the weights alone with --no-load-optim"
            )


def latest_checkpoint(load: str | Path) -> Path | None:
    """Directory of the newest whole checkpoint, or None if there is none.

    Raises:
        CheckpointError: if `latest` names one that is gone.
    """
    latest = Path(load) / "latest"
    if not latest.exists():
        return None
    directory = Path(load) / latest.read_text().strip()
    if not directory.is_dir():
        raise CheckpointError(f"{latest} names {directory.name}, which is not there: write an existing tag into it")
    return directory


def find_checkpoint(
    config: CheckpointConfig, model: ModelConfig, layout: ParallelLayout, zero_stage: int
) -> tuple[Path, CheckpointInfo] | None:
    """The checkpoint that a run continues from, known to fit; None to start afresh.

    Raises:
        CheckpointError: if there must be one and is not, or it does not fit.
    """
    if config.load is None:
        return None
    directory = latest_checkpoint(config.load)
    if directory is None:
        if config.exit_on_missing_checkpoint or config.finetune:
            raise CheckpointError(f"--load {config.load} holds no checkpoint: give a directory that does")
        return None
    info = CheckpointInfo.read(directory)
    weights_only = config.finetune or config.no_load_optim
    info.check(model, layout, zero_stage, weights_only=weights_only)
    _check_files(directory, info, model, weights_only=weights_only)
    return directory, info


def _check_files(directory: Path, info: CheckpointInfo, model: ModelConfig, *, weights_only: bool) -> None:
    """See that every file is there and was written to its end, so that no rank finds out alone.

    Without the optimizer's files DeepSpeed would go on with a fresh optimizer.
    """
    stages = range(info.layout["pipeline_parallel_size"])
    patterns = [layer_file(layer) for layer in layers_with_weights(model)]
    patterns += [f"mp_rank_{stage:02d}_model_states.pt" for stage in stages]
    if info.zero_stage and not weights_only:
        replicas = range(info.layout["data_parallel_size"])
        # In bf16 the names start with bf16_.
        patterns += [
            f"*zero_pp_rank_{replica}_mp_rank_{stage:02d}_optim_states.pt" for replica in replicas for stage in stages
        ]
    for pattern in patterns:
        path = next(directory.glob(pattern), None)
        # Tensors are saved as zip archives, whose table of contents comes last.
        if path is None or not is_zipfile(path):
            fault = f"lacks {pattern.removeprefix('*')}" if path is None else f"is damaged: {path.name} is not whole"
            raise CheckpointError(
                f"checkpoint {directory} {fault}: put the file back, or let {directory.parent / 'latest'} name another "
                "checkpoint"
            )


def load_checkpoint(engine: TokenSlicePipelineEngine, directory: Path, config: CheckpointConfig) -> None:
    """Load a checkpoint that `find_checkpoint` found, on every rank."""
    weights_only = config.finetune or config.no_load_optim
    engine.load_checkpoint(
        str(directory.parent),
        tag=directory.name,
        load_module_only=weights_only,
        load_optimizer_states=not weights_only,
        load_lr_scheduler_states=False,
    )


def save_checkpoint(engine: TokenSlicePipelineEngine, save: str, info: CheckpointInfo) -> Path:
    """Save a checkpoint, on every rank; `latest` names it only once it is whole."""
    tag = f"global_step{info.iteration}"
    if engine.global_rank == 0:
        info.write(Path(save) / tag)
    engine.save_checkpoint(save, tag=tag)
    return Path(save) / tag
