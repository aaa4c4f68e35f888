"""What a launch from this machine would look like."""

import os
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from megatron_terapipe.doctor.facts import Launching
from megatron_terapipe.doctor.probe.names import variables
from megatron_terapipe.doctor.probe.software import programs

DISTRIBUTION = "megatron-terapipe"
ENVIRONMENT_FILE = ".deepspeed_env"


def launching_here(*, hostfile: str | None, launcher: str, save: str | None, master_port: int) -> Launching:
    """Return how a launch would start from this process's directory.

    Args:
        hostfile: its path; None if only this machine is looked at.
        save: the directory for checkpoints; None = the working directory.
    """
    directory = os.getcwd()
    return Launching(
        hostfile=hostfile,
        launcher=launcher,
        python=sys.executable,
        project=str(Path(__file__).resolve().parents[2]),
        directory=directory,
        checkpoints=os.path.abspath(save or directory),
        save_is_given=save is not None,
        master_port=master_port,
        programs=programs(),
        variables=variables(),
        environment_file=_environment_file(),
        requirements=_requirements(),
    )


def _environment_file() -> tuple[str, ...] | None:
    """Return the lines of the files that DeepSpeed's launcher reads, the one of the home directory first."""
    name = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    lines: list[str] | None = None
    for folder in (Path.home(), Path()):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [*(lines or ()), *text.splitlines()]
    return None if lines is None else tuple(lines)


def _requirements() -> tuple[str, ...] | None:
    """Return what this project needs of packages in every installation."""
    try:
        listed = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return None
    return tuple(each for each in listed if "extra ==" not in each)
