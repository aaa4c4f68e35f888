"""Directories of checkpoints: names of their files, which one to load, and how a new one takes its place.

Needs no torch, so that flags can use it.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from shutil import rmtree

from deepspeed_ext.plan.text_files import bounded_bytes, open_locked
from megatron_terapipe.checkpoint.foreign import MEGATRON, is_megatron, megatron_checkpoint, refuse_foreign
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import (
    ASIDE,
    MANIFEST_FILE,
    FileFacts,
    Manifest,
    replace_durably,
    sync_folder,
    write_durably,
)
from megatron_terapipe.checkpoint.megatron_model import megatron_info
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.checkpoint import checkpoint_tag
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.families.registry import is_model_folder

LATEST = "latest"
"""File that holds the tag of the newest whole checkpoint."""

REPLACED = ".replaced"
"""Ends the name of a checkpoint while another takes its name."""

DAMAGED = ".damaged"
"""Ends the name of a checkpoint that was found damaged, and kept aside."""

BF16_PREFIX = "bf16_"
"""Begins the names of the optimizer's files in bf16."""


def _model_rank(stage: int, tensor_parallel_rank: int, tensor_parallel_size: int) -> str:
    return f"mp_rank_{stage * tensor_parallel_size + tensor_parallel_rank:02d}"


def state_file(stage: int, tensor_parallel_rank: int, tensor_parallel_size: int) -> str:
    """File of a rank's counters and, where the optimizer's state is not partitioned, of that state."""
    return f"{_model_rank(stage, tensor_parallel_rank, tensor_parallel_size)}_model_states.pt"


def optimizer_files(
    stage: int, tensor_parallel_rank: int, tensor_parallel_size: int, data_parallel_size: int
) -> list[str]:
    """Files of a rank's partitioned optimizer state, one for each replica, without the prefix of bf16."""
    rank = _model_rank(stage, tensor_parallel_rank, tensor_parallel_size)
    return [f"zero_pp_rank_{replica}_{rank}_optim_states.pt" for replica in range(data_parallel_size)]


def experts_file(layer: int, expert_parallel_rank: int) -> str:
    """File of the weights of a rank's experts in a pipeline layer, where ranks have different experts."""
    return f"layer_{layer:02d}-experts_{expert_parallel_rank:02d}-model_states.pt"


def experts_state_file(stage: int, expert_parallel_rank: int) -> str:
    """File of the optimizer's state of a rank's experts in a stage, where ranks have different ones, unpartitioned."""
    return f"stage_{stage:02d}-experts_{expert_parallel_rank:02d}-optim_states.pt"


_LONGEST_NAME = 200
"""Bytes of the longest name of a checkpoint: file systems take 255, and others are made of it."""


def latest_checkpoint(load: str | Path) -> Path | None:
    """Directory of the newest whole checkpoint, or None if there is none.

    A run that died before it wrote its first `latest` may have left a whole checkpoint without it.
    """
    if Path(load).exists() and not Path(load).is_dir():
        raise CheckpointError(f"--load {load} is a file: give the directory that a run saved to")
    latest = Path(load) / LATEST
    tag = _read_tag(latest)
    if tag is None:
        whole = _with_iteration(Path(load), MANIFEST_FILE)
        return max(whole, key=lambda found: (found[0], -len(found[1].name)), default=(0, None))[1]
    directory = _directory(Path(load), tag)
    if directory is None:
        raise CheckpointError(f"{latest} names {tag}, which is not there: write an existing tag into it")
    return directory


def names_model_folder(load: str | Path) -> bool:
    """Whether `--load` names a folder of Hugging Face, and not a directory of checkpoints of ours."""
    return is_model_folder(load) and latest_checkpoint(load) is None


def tagged_checkpoint(load: str | Path, tag: str | None) -> Path | None:
    """Directory of the checkpoint with a tag; with None, of the newest whole one, or None if there is none."""
    if refuse_foreign("--load", load) == MEGATRON:
        return megatron_checkpoint(load, tag)
    if tag is None:
        return latest_checkpoint(load)
    directory = _directory(Path(load), tag)
    if directory is None:
        found = sorted(path.parent.name for path in Path(load).glob(f"*/{RUN_FILE}")) or ["none"]
        raise CheckpointError(f"there is no checkpoint {tag} in {load}: name one that is there ({', '.join(found)})")
    return directory


def existing_checkpoint(load: str | Path, tag: str | None) -> Path:
    """Directory of the checkpoint with a tag, or of the newest whole one, where there must be one."""
    directory = tagged_checkpoint(load, tag)
    if directory is None:
        raise CheckpointError(no_checkpoint(load))
    return directory


def no_checkpoint(load: str | Path) -> str:
    """Return the error for a directory without checkpoints, which may be a checkpoint itself."""
    path = Path(load)
    if (path / RUN_FILE).is_file():
        return f"--load {load} is one checkpoint: give --load {path.parent} --load-tag {path.name}"
    return f"--load {load} holds no checkpoint: give a directory that a run saved to"


def readable_checkpoint(
    load: str | Path,
    tag: str | None,
    *,
    or_previous: bool,
    model: ModelConfig | None = None,
    program: str | None = None,
) -> tuple[Path, CheckpointInfo] | None:
    """Directory and facts of a checkpoint; None if there is no checkpoint.

    Args:
        tag: name of the checkpoint; None for the newest.
        or_previous: take the newest readable one before it, if its own facts cannot be read.
        model: of the run that loads it; None where there is none yet.
        program: file of the program whose layers the run has; None for the GPT's.
    """
    while True:
        try:
            directory = tagged_checkpoint(load, tag)
            if directory is None:
                return None
            return directory, checkpoint_info(directory, model, program)
        except CheckpointError:
            before = previous_tag(load, tag) if or_previous else None
            if before is None:
                raise
            tag = before


def checkpoint_info(directory: Path, model: ModelConfig | None = None, program: str | None = None) -> CheckpointInfo:
    """Return the facts of one checkpoint, of ours or, for a run with a model, of Megatron-LM."""
    if is_megatron(directory):
        return megatron_info(directory, model, program)
    return CheckpointInfo.read(directory)


def previous_tag(load: str | Path, tag: str | None) -> str | None:
    """Tag of the newest checkpoint before another, whole or not; None if there is none.

    Args:
        tag: of the checkpoint that cannot be used; None for the one that `latest` names, if any.
    """
    before = _requested_iteration(Path(load), tag)
    older = [number for number, _ in _with_iteration(Path(load), RUN_FILE) if before is None or number < before]
    return checkpoint_tag(max(older)) if older else None


def skipped_checkpoints(taken: Path, tag: str | None) -> list[Path]:
    """Directories of the checkpoints after the one that was loaded, up to the one that was requested.

    Args:
        tag: that was requested; None for the one that `latest` names, if any.
    """
    requested, first = _requested_iteration(taken.parent, tag), _iteration(taken.name)
    found = [(number, path) for path in taken.parent.iterdir() if (number := _iteration(path.name)) is not None]
    return [
        path
        for number, path in sorted(found)
        if first is not None and first < number and (requested is None or number <= requested)
    ]


def _requested_iteration(load: Path, tag: str | None) -> int | None:
    """Iteration of a tag, or of that in `latest`; None if there is none."""
    try:
        name = _read_tag(load / LATEST) if tag is None else tag
    except CheckpointError:
        return None
    return None if name is None else _iteration(name)


def _read_tag(latest: Path) -> str | None:
    """The tag in a file `latest`; None if there is no such file."""
    try:
        tag = bounded_bytes(latest, _LONGEST_NAME + 1).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except ValueError:  # It is longer, or a pipe without an end.
        tag = ""
    except OSError as error:
        raise CheckpointError(
            f"{latest} cannot be read ({error.strerror}): write the tag of a checkpoint into it"
        ) from None
    if not re.fullmatch(r"[\w.+=@,-]+", tag) or set(tag) == {"."}:
        raise CheckpointError(f"{latest} holds no name of a checkpoint: write the tag of one that is there into it")
    return tag


def _directory(load: Path, tag: str) -> Path | None:
    """Directory of a tag, or the one with `.replaced` if a run died while it was replaced."""
    try:
        return next((path for path in (load / tag, load / f"{tag}{REPLACED}") if path.is_dir()), None)
    except OSError:  # The name is longer than any.
        return None


def _iteration(tag: str) -> int | None:
    match = re.fullmatch(rf"global_step(\d{{1,18}})({re.escape(REPLACED)})?", tag)
    return None if match is None else int(match[1])


def _with_iteration(load: Path, file: str) -> list[tuple[int, Path]]:
    """Iterations and directories of the checkpoints that hold a file."""
    found = ((_iteration(path.parent.name), path.parent) for path in load.glob(f"*/{file}"))
    return [(number, directory) for number, directory in found if number is not None]


LOCK = "run.lock"
"""File that the run holds which saves into a directory, with its host and process."""

_ENDING_S = 5.0
"""Seconds for which a run waits for the lock of a process that has ended: its last thread closes its files."""


@contextmanager
def only_run_in(save: str | Path, is_running: Callable[[int], bool] = lambda process: True) -> Iterator[None]:
    """Hold a directory of checkpoints until the block or this process ends; `CheckpointError` if another run does.

    Args:
        is_running: whether a process of this host is running; for the lock of one that is not, this one waits a little.
    """
    lock, was_there = Path(save) / LOCK, Path(save).exists()
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + _ENDING_S
        while True:
            file, holder = open_locked(lock), "which is ending"
            # Its holder may remove it at this moment.
            with suppress(FileNotFoundError), lock.open("rb") as written:
                holder = written.read(_LONGEST_NAME).decode(errors="replace")
            if file is not None or _may_run(holder, is_running) or time.monotonic() > until:
                break
            time.sleep(0.05)
    except OSError as error:
        raise CheckpointError(f"--save {save} cannot be written ({error.strerror}): name another") from None
    if file is None:
        raise CheckpointError(
            f"--save {save} is in use by another run ({holder}): wait for its end, or name another --save; if its host "
            f"has failed, remove {lock}"
        )
    with suppress(OSError):  # The disk may be full.
        file.truncate(0)
        own = f"host {socket.gethostname()}, process {os.getpid()}, since {datetime.now():%F %T}"
        os.write(file.fileno(), own.encode())
    try:
        yield
    finally:
        with suppress(OSError):  # The disk may be read-only by now; the lock ends with the file.
            lock.unlink(missing_ok=True)
        file.close()
        if not was_there:
            with suppress(OSError):  # It has checkpoints.
                lock.parent.rmdir()


def _may_run(holder: str, is_running: Callable[[int], bool]) -> bool:
    """Whether the process of a lock, by its text, is on another host or is running."""
    match = re.match(r"host (.+), process (\d+), since ", holder)
    return match is None or match[1] != socket.gethostname() or is_running(int(match[2]))


def complete(partial: Path, directory: Path, files: Mapping[str, FileFacts], texts: Mapping[str, str | bytes]) -> None:
    """Write the last files of a checkpoint, with the manifest of all, and give it its name.

    Args:
        files: facts of the files that are written.
        texts: contents of those that are not, also of those in folders.
    """
    folders = {(partial / name).parent for name in texts}
    for folder in folders:
        folder.mkdir(exist_ok=True)
    written = {name: write_durably(partial / name, text) for name, text in texts.items()}
    write_durably(partial / MANIFEST_FILE, Manifest({**files, **written}).text())
    for folder in {*folders, partial}:
        sync_folder(folder)
    put_in_place(partial, directory)


def put_in_place(partial: Path, directory: Path) -> None:
    """Give a whole checkpoint its name, in place of an older one of that name, and let `latest` point to it.

    If the process dies in between, a whole one is found: under the name, or with `.replaced`.
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
    """Remove whole checkpoints before the newest `keep_last` up to an iteration, and all partial ones.

    Later ones, of a run that was set back, and others' files stay. One that is not whole does not count, and stays.

    Args:
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
        # Renamed first: a partly removed directory must not have the name of a checkpoint.
        removed = saved[older].rename(save / f"{saved[older].name}{ASIDE}")
        rmtree(removed, ignore_errors=True)


def keep_aside(directory: Path, instead: Path) -> Path:
    """Take a damaged checkpoint out of the way, where no later save removes it; return its new directory."""
    replace_durably(directory.with_name(LATEST), instead.name)
    names = (f"{directory.name}{DAMAGED}{number or ''}" for number in range(10_000))
    aside = next(path for name in names if not (path := directory.with_name(name)).exists())
    directory.rename(aside)
    sync_folder(directory.parent)
    return aside


def _is_whole(directory: Path) -> bool:
    """Whether all files are there with their sizes."""
    try:
        CheckpointInfo.read(directory)
        Manifest.read(directory).check_sizes(directory)
    except CheckpointError:
        return False
    return True
