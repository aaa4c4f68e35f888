"""Sees that the checkpoint of a run is whole before any of it is used, or takes the one before it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.directories import names_model_folder, passed_over, previous_tag
from megatron_terapipe.checkpoint.saving.rotation import keep_aside
from megatron_terapipe.checkpoint.verify import verify_checkpoint
from megatron_terapipe.config import Config
from megatron_terapipe.errors import AgreedCheckpointError
from megatron_terapipe.training.start.run import Run, prepare


def with_whole_checkpoint(run: Run, given: Config, say: Callable[[str], None]) -> Run:
    """Return a run whose checkpoint, if it has one, is what was saved; every rank must call it at the same time.

    Raises:
        AgreedCheckpointError: on every rank alike, if the checkpoint is damaged, and no other may or can be taken.
    """
    if run.checkpoint is None:
        return run
    asked = run.config.checkpoint.tag
    taken = _verified(run, given, say)
    if run.config.checkpoint.load_previous_if_damaged:
        for line in from_first_rank(partial(_keep_damaged_aside, taken, asked)):
            say(line)
    return taken


def _verified(run: Run, given: Config, say: Callable[[str], None]) -> Run:
    """Return the run, or one that goes on from an older checkpoint."""
    assert run.checkpoint is not None
    directory, info = run.checkpoint
    config = run.config.checkpoint
    try:
        line = verify_checkpoint(
            directory,
            info,
            run.config.model,
            weights_only=config.weights_only,
            reads=not config.no_verify_checkpoint,
        )
    except AgreedCheckpointError as error:
        before = None
        if config.load_previous_if_damaged and not names_model_folder(directory):
            before = from_first_rank(partial(previous_tag, directory.parent, directory.name))
        if before is None:
            raise
        say(f" warning: {error}")
        return _verified(prepare(_loading(given, before), run.launch), given, say)
    if line is not None:
        say(line)
    return run


def _loading(config: Config, tag: str) -> Config:
    return replace(config, checkpoint=replace(config.checkpoint, load_tag=tag, ckpt_step=None))


def _keep_damaged_aside(run: Run, asked: str | None) -> list[str]:
    """Take those that were passed over out of the way of later saves; return lines for the log."""
    assert run.checkpoint is not None
    taken, save = run.checkpoint[0], run.config.checkpoint.save
    if names_model_folder(taken):
        return []
    # Nothing is changed where this run does not save.
    saves_here = save is not None and Path(save).resolve() == taken.parent.resolve()
    lines = []
    for damaged in passed_over(taken, asked):
        kept = keep_aside(damaged, taken) if saves_here else damaged
        lines.append(f" warning: {damaged.name} is damaged, and kept as {kept}: going on from {taken}")
    return lines
