"""Configurations of Megatron-DeepSpeed: the scripts of its examples."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.migration_survey.attempts import Attempt
from benchmarks.migration_survey.shell_scripts import attempts_of_scripts


def attempts(checkout: Path, folder: Path) -> Iterator[Attempt]:
    """Yield the commands of all scripts that pretrain a GPT.

    Args:
        folder: an empty folder for copies.
    """
    yield from attempts_of_scripts("Megatron-DeepSpeed, scripts", checkout, ("examples_deepspeed", "examples"), folder)
