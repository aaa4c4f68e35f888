"""The directories of checkpoints: a whole one takes its name, and older ones go."""

import re
from pathlib import Path
from shutil import rmtree

from megatron_terapipe.checkpoint.file_names import DAMAGED, LATEST, REPLACED
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE, Manifest
from megatron_terapipe.checkpoint.saving.durable import ASIDE, replace_durably, sync_folder
from megatron_terapipe.errors import CheckpointError


def put_in_place(partial: Path, directory: Path) -> None:
    """Give a whole checkpoint its name, in place of an older one of that name, and let `latest` point to it.

    Whoever dies in between leaves a whole one that is found: under the name, or beside it with `.replaced`.
    """
    replaced = directory.with_name(f"{directory.name}{REPLACED}")
    if directory.exists():
        rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    sync_folder(directory.parent)
    replace_durably(directory.with_name(LATEST), directory.name)
    rmtree(replaced, ignore_errors=True)


def remove_older(save: Path, iteration: int, keep_last: int | None) -> None:
    """Keep so many whole checkpoints up to an iteration, and nothing of those that were never done.

    Later ones, of a run that was set back, and others' files stay. One that is not whole is no one's reserve: it does
    not count, and stays.

    Args:
        iteration: the last that was saved.
        keep_last: number of checkpoints to keep; None for all.
    """
    for path in save.iterdir():
        if re.fullmatch(rf"global_step\d+{re.escape(ASIDE)}", path.name):
            rmtree(path, ignore_errors=True)
    if keep_last is None:
        return
    saved = {
        int(match[1]): path
        for path in save.iterdir()
        if (match := re.fullmatch(r"global_step(\d{1,18})", path.name)) and (path / RUN_FILE).is_file()
    }
    whole = [each for each in sorted(saved) if each <= iteration and _is_whole(saved[each])]
    for older in whole[:-keep_last]:
        # Under another name first: what is half removed bears no checkpoint's name.
        going = saved[older].rename(save / f"{saved[older].name}{ASIDE}")
        rmtree(going, ignore_errors=True)


def keep_aside(directory: Path, instead: Path) -> Path:
    """Take a damaged checkpoint out of the way, where no later save removes it; return its new directory."""
    replace_durably(directory.with_name(LATEST), instead.name)
    names = (f"{directory.name}{DAMAGED}{number or ''}" for number in range(10_000))
    aside = next(path for name in names if not (path := directory.with_name(name)).exists())
    directory.rename(aside)
    sync_folder(directory.parent)
    return aside


def _is_whole(directory: Path) -> bool:
    """Whether all files are there with their sizes; of a checkpoint without a manifest, as far as is known."""
    try:
        if CheckpointInfo.read(directory).has_manifest or (directory / MANIFEST_FILE).exists():
            Manifest.read(directory).check_sizes(directory)
    except CheckpointError:
        return False
    return True
