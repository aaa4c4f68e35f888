"""What a run does when a rank or a launcher is lost: one line with the remedy, and the tracebacks in files."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from deepspeed_ext.runtime.launch.environment import LaunchEnvironment
from deepspeed_ext.runtime.liveness.watch import RankWatch, watch_rank
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.config import Config
from megatron_terapipe.errors import CheckpointError


class LostRank(Exception):
    """The end of this rank because another one is gone, which has been said."""


def watch_over(
    launch: LaunchEnvironment, config: Config, ending: Callable[[str, bool], object] = lambda why, failed: None
) -> RankWatch:
    """Return the watch of this rank. Call it before torch is imported.

    Args:
        ending: told why the run ends, and whether something is wrong, before this process leaves at once; by the first
            rank, or one that speaks for it.
    """
    # Read when torch is imported. Torch's store would print a stack of its own wherever its keeper is gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return watch_rank(launch, remedy=lambda: remedy(config.checkpoint.save), ending=ending)


def remedy(save: str | None) -> str:
    """Return what a user can do once a run has died."""
    try:
        found = None if save is None else latest_checkpoint(save)
    except CheckpointError:
        return f"see to the checkpoints in {save}, and resume with --load {save}"
    if found is None:
        return "no checkpoint was saved, so start again"
    return f"resume with --load {save}, which goes on from {found.name}"


def is_of_communication(error: BaseException) -> bool:
    """Whether an error may come of a rank that is gone: gloo and NCCL raise RuntimeErrors, and torch kinds of them."""
    return isinstance(error, RuntimeError)


def keep_traceback(error: BaseException, directory: Path, rank: int) -> None:
    """Write the traceback of an error beside the ledgers, where it is read by those who look for more than one line."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(traceback.format_exception(error))
    (directory / f"traceback_rank{rank}.txt").write_text(text, encoding="utf-8")
