"""One command of another project, tried: parsed, and checked as a dry run checks it."""

import os
import traceback
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from deepspeed_ext.runtime.launch.environment import LaunchEnvironment
from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.errors import UserError

HERE = ("--dry-run", "--dry-run-without-files")
"""Flags that leave out what is not here: devices, tokenizers, data, checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A configuration of another project, as a command for `pretrain_gpt.py`."""

    origin: str
    """Set that it belongs to: a row of the table."""

    name: str
    """Its name in that set."""

    words: tuple[str, ...] = ()
    """Flags and values."""

    directory: Path = Path()
    """Directory that names of files are relative to."""

    refusal: str = ""
    """Line with which a converter refused it, so that there are no words; empty if it did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of an attempt."""

    attempt: Attempt
    """The attempt."""

    line: str = ""
    """Line that refuses it; empty if it passed."""

    is_defect: bool = False
    """Whether it ended in anything but a line of ours."""

    @property
    def passed(self) -> bool:
        """Whether it would be trained."""
        return not self.line

    def features(self) -> Iterator[str]:
        """Yield what stops it: the flags with which each reason of the line begins."""
        if self.is_defect:
            yield "defect"
            return
        for reason in self.line.split("; ") if self.line else ():
            beginning = reason.split(": ", 1)[0]
            flags = [part.split()[0] for part in beginning.split(", ") if part.startswith("--")]
            yield from flags or [beginning]


def outcome_of(attempt: Attempt) -> Outcome:
    """Return what becomes of an attempt in this process; nothing is started."""
    if attempt.refusal:
        return Outcome(attempt=attempt, line=attempt.refusal)
    # Without it DeepSpeed looks for a device, and says that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Imported here: torch and DeepSpeed take seconds.
    from megatron_terapipe.training.start.dry_run import dry_run

    try:
        with chdir(attempt.directory), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            config = read_arguments([*attempt.words, *HERE]).config
            dry_run(config, LaunchEnvironment.of_dry_run({}, stated=None, least=config.parallel.least_world_size))
    except UserError as error:
        line = str(error)
        return Outcome(attempt=attempt, line=line, is_defect="\n" in line)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return Outcome(attempt=attempt, line=line, is_defect=True)
    return Outcome(attempt=attempt)
