"""`terapipe train`: runs pretrain_gpt.py, with DeepSpeed's launcher where nothing else has started its ranks."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from deepspeed_ext.plan.text.command_line import run_command
from megatron_terapipe.arguments.help_text import asked_for
from megatron_terapipe.arguments.parser import read_command_line
from megatron_terapipe.command.launcher_flags import (
    dry_run_words,
    is_launched,
    launch_command,
    launch_variables,
    split,
)
from megatron_terapipe.command.train_flags import build_parser, help_parser, whole_parser
from megatron_terapipe.errors import ConfigError

__all__ = ["build_parser", "main", "whole_parser"]


def main(argv: Sequence[str] | None = None, prog: str = "python -m megatron_terapipe train") -> int:
    """Train, and return the exit code of the run; the launcher, once it is started, takes the place of this process.

    Args:
        argv: flags of the launcher and of the trainer, in any order; None = those of this process.
        prog: what people type before them.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(lambda: _run(words, prog))


def _run(words: list[str], prog: str) -> int:
    if not words:
        raise ConfigError(f"no flag says what to train: see {prog} --help")
    group = asked_for(words)
    if group is not None:
        help_parser(prog, group).print_help()
        return 0
    launching, training = split(words)
    # Here, so that a misspelled flag is said before any rank is started.
    given = read_command_line(training).given
    if given.get("dry_run") or given.get("dry_run_without_files"):
        training, ranks = dry_run_words(launching, training)
        os.environ.update(ranks)
        return _trainer()(training)
    if is_launched(launching, os.environ):
        return _train(training)
    command = launch_command(launching, training)
    sys.stdout.flush()
    # In place of this process: signals reach the launcher, and its exit code is that of the command.
    os.execve(command[0], command, launch_variables(launching, os.environ))  # noqa: S606 - no shell is wanted


def _trainer() -> Callable[[Sequence[str]], int]:
    # Imported where this process runs it.
    import pretrain_gpt

    return pretrain_gpt.main


def _train(words: Sequence[str]) -> int:
    try:
        return _trainer()(words)
    except OSError:
        # As by itself: what fails in the midst of a run is no bad input, and says where it failed.
        traceback.print_exc()
        return 1
