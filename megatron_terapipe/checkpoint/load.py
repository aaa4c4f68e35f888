"""Loads a checkpoint that was found to fit, on every rank."""

from pathlib import Path

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from megatron_terapipe.checkpoint.index import SavedRun
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.restore import restore
from megatron_terapipe.config import CheckpointConfig


def load_checkpoint(
    engine: TokenSlicePipelineEngine, directory: Path, info: CheckpointInfo, saved: SavedRun, config: CheckpointConfig
) -> None:
    """Load a checkpoint that `find_checkpoint` found, whatever layout either has.

    Args:
        saved: facts that the first rank read for all.

    Raises:
        CheckpointError: if a file cannot be read, or lacks a parameter.
    """
    restore(engine, directory, info, saved, weights_only=config.weights_only)
    if config.weights_only:
        # The masks of dropout go by the step, so a run that goes on counts on.
        engine.global_steps = 0 if config.finetune else info.iteration
        return
    engine.global_steps, engine.skipped_steps = saved.counters["global_steps"], saved.counters["skipped_steps"]
    engine.global_samples = info.consumed_samples
    if engine.fp16_enabled():
        _go_on_scaling(engine.optimizer.loss_scaler, saved.loss_scaler)


def _go_on_scaling(ours: object, theirs: object | None) -> None:
    """Go on from where an adaptive loss scale was. A fixed one is what the flags say."""
    for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
        if getattr(ours, "dynamic", False) and hasattr(ours, name) and hasattr(theirs, name):
            setattr(ours, name, getattr(theirs, name))
