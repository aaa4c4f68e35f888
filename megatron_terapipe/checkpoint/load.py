"""Loads a checkpoint that was found to fit, on every rank."""

from pathlib import Path

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.restore import restore
from megatron_terapipe.checkpoint.saved_optimizer import read_counters, read_loss_scaler
from megatron_terapipe.config import CheckpointConfig


def load_checkpoint(
    engine: TokenSlicePipelineEngine, directory: Path, info: CheckpointInfo, config: CheckpointConfig
) -> None:
    """Load a checkpoint that `find_checkpoint` found, whatever layout either has.

    Args:
        engine: a fresh engine.
        directory: of the checkpoint.
        info: what it says of its run.
        config: the checkpoint section.

    Raises:
        CheckpointError: if a file cannot be read, or lacks a parameter.
    """
    restore(engine, directory, info, weights_only=config.weights_only)
    if config.weights_only:
        # The masks of dropout go by the step, so a run that goes on counts on.
        engine.global_steps = 0 if config.finetune else info.iteration
        return
    counters = read_counters(directory, info)
    engine.global_steps, engine.skipped_steps = counters["global_steps"], counters["skipped_steps"]
    engine.global_samples = info.consumed_samples
    if engine.fp16_enabled():
        _go_on_scaling(engine.optimizer.loss_scaler, read_loss_scaler(directory, info))


def _go_on_scaling(ours: object, theirs: object | None) -> None:
    """Go on from where an adaptive loss scale was. A fixed one is what the flags say."""
    for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
        if getattr(ours, "dynamic", False) and hasattr(ours, name) and hasattr(theirs, name):
            setattr(ours, name, getattr(theirs, name))
