"""Processes that save and are killed at one of their accesses to the disk, and the checkpoint found after each."""

import os
import shutil
import sys
from pathlib import Path

from megatron_terapipe.checkpoint.directories import readable_checkpoint
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import Manifest
from megatron_terapipe.checkpoint.save import FileWriter, UnfinishedSave, _aside, _prepare
from tests.inference.checkpoints import checkpoint_info

WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod"}
"""Events that Python announces before it does them, and that change the disk."""
KILLED = 9


def save(folder: Path, iteration: int, keep_last: int | None = None) -> None:
    """Save as the first rank does, without an engine."""
    info = checkpoint_info(iteration=iteration)
    directory = folder / f"global_step{iteration}"
    _prepare(_aside(directory), 1000)
    writer = FileWriter(in_memory=iteration % 2 == 0)
    for layer in range(2):
        writer.save({"iteration": iteration}, str(_aside(directory) / f"layer_{layer:02d}-model_00-model_states.pt"))
    writer.write_buffers()
    UnfinishedSave(directory, info, writer, [], keep_last)._complete([(writer.facts, writer.fault, [])])


def killed_at(point: int, folder: Path, iteration: int, keep_last: int | None) -> bool:
    """Whether a process that saves came as far as to be killed at an access to the disk."""
    child = os.fork()
    if child == 0:
        seen = [0]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event in WATCHED and (event != "open" or str(arguments[0]).startswith(str(folder))):
                seen[0] += 1
                if seen[0] > point:
                    os._exit(KILLED)

        sys.addaudithook(watch)
        try:
            save(folder, iteration, keep_last)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED)
    return code == KILLED


def found(folder: Path) -> CheckpointInfo:
    """The checkpoint that a run would continue from, after a check of all its files."""
    read = readable_checkpoint(folder, None, or_previous=False)
    assert read is not None
    directory, info = read
    manifest = Manifest.read(directory)
    manifest.check_sizes(directory)
    manifest.check_content(directory, manifest.files)
    return info


def kill_at_every_point(folder: Path, before: list[int], iteration: int, keep_last: int | None) -> tuple[int, set[int]]:
    """Kill a save at each point; return how many there are, and the iterations that were found."""
    clean, used = folder / "clean", folder / "used"
    for each in before:
        save(clean, each)
    point, killed, ends = 0, True, set()
    while killed:
        shutil.copytree(clean, used)
        killed = killed_at(point, used, iteration, keep_last)
        ends.add(found(used).iteration)
        # The next save removes the remaining files.
        save(used, 9, keep_last)
        assert found(used).iteration == 9
        assert not list(used.glob("*.partial"))
        shutil.rmtree(used)
        point += 1
    return point, ends
