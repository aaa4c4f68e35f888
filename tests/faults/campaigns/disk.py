"""Disks that are full, become full, or can no longer be written to: tiny ones in memory, so this needs root."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import PRETRAIN, Launch, flags
from tests.faults.campaign import Outcome, Settings, ending
from tests.faults.campaigns.damage import SAVES

ONE_CHECKPOINT = 1_100_000
"""Bytes of a checkpoint of the run, about; it has 0.85 MB of tensors."""


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Yield an outcome for each fault of a disk."""
    if os.geteuid() != 0:
        yield Outcome(fault="a disk that is full", tried=0, message="not tried: it needs the right to mount")
        return
    data = write_corpus(settings.folder)
    for name, tried in {
        "no room for one checkpoint": _no_room_at_the_start,
        "full at the second save": _full_at_the_second,
        "full in the middle of a file": _full_in_a_file,
        "full under --metrics-file, --tensorboard-dir and --timeline": _full_under_the_logs,
        "read-only while it trains": _read_only,
        "read-only while it trains, --async-save": lambda *places: _read_only(*places, "--async-save"),
        "read-only for a while, --train-on-if-save-fails": _read_only_for_a_while,
    }.items():
        folder = settings.folder / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        yield replace(tried(folder, data), fault=name)


def _no_room_at_the_start(folder: Path, data: Path) -> Outcome:
    with _disk(folder, ONE_CHECKPOINT // 2):
        return replace(_ends(Launch(folder, flags(data, *SAVES)), folder, None, "has no room in"), longest_s=None)


def _full_at_the_second(folder: Path, data: Path) -> Outcome:
    with _disk(folder, ONE_CHECKPOINT * 3 // 2) as disk:
        run = Launch(folder, flags(data, *SAVES, "--train-iters", 4))
        run.wait_for(lambda: (disk / "latest").exists())
        outcome = _ends(run, folder, "global_step2", "has no room in")
        # Room is made; the run goes on from where it was.
        _mount(disk, f"remount,size={4 * ONE_CHECKPOINT}")
        again = Launch(folder, flags(data, *SAVES, "--train-iters", 4, "--load", "checkpoints"))
        if again.wait() != 0 or (disk / "latest").read_text() != "global_step4":
            return replace(outcome, broken=(*outcome.broken, "it did not continue after room was made"))
        return outcome


def _full_in_a_file(folder: Path, data: Path) -> Outcome:
    """Beyond the check of room: a rank may write only a part of a file, as where others fill the disk."""
    with _disk(folder, 8 * ONE_CHECKPOINT) as disk:
        run = Launch(folder, flags(data, *SAVES, "--train-iters", 1000))
        run.wait_for(lambda: (disk / "latest").exists())
        for process in _ranks(run)[-1:]:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, 60_000))
        return _ends(run, folder, None, "was not saved (")


def _full_under_the_logs(folder: Path, data: Path) -> Outcome:
    with _disk(folder, 40_000) as disk:
        outputs = {name: disk / name for name in ("--metrics-file", "--tensorboard-dir", "--timeline")}
        words = [word for pair in outputs.items() for word in pair]
        words += ["--tensorboard-queue-size", 1, "--train-iters", 300, "--eval-iters", 0, "--save", folder / "saved"]
        run = Launch(folder, flags(data, *words))
        code, text = run.wait(), run.output()
        lines = [line for line in text.splitlines() if line.endswith("training continues")]
        broken = [f"exit code {code}"] if code or not (folder / "saved" / "latest").exists() else []
        for output in outputs:
            if sum(f"{output} " in line for line in lines) != 1:
                broken.append(f"{output}: not one warning")
        if "Traceback" in text or not (disk / "--metrics-file").read_text().endswith("}\n"):
            broken.append("a traceback or an incomplete line")
        message = lines[0].strip().replace(str(folder), "") if lines else ""
        return Outcome(fault="", tried=1, message=message, broken=tuple(broken))


def _read_only(folder: Path, data: Path, *more: str) -> Outcome:
    with _disk(folder, 8 * ONE_CHECKPOINT) as disk:
        run = Launch(folder, flags(data, *SAVES, "--train-iters", 1000, "--keep-last-n-checkpoints", 2, *more))
        run.wait_for(lambda: (disk / "latest").exists())
        _make_read_only(disk)
        return _ends(run, folder, None, "")


def _read_only_for_a_while(folder: Path, data: Path) -> Outcome:
    with _disk(folder, 8 * ONE_CHECKPOINT) as disk:
        keep = ("--keep-last-n-checkpoints", 2, "--train-on-if-save-fails")
        run = Launch(folder, flags(data, *SAVES, "--train-iters", 200, *keep))
        run.wait_for(lambda: (disk / "latest").exists())
        _make_read_only(disk)
        run.wait_for(lambda: "; training continues" in run.output())
        subprocess.run(["umount", "--lazy", disk], check=True)
        code, lines = run.wait(), [line for line in run.output().splitlines() if "; training continues" in line]
        broken = [] if code == 0 else [f"exit code {code}"]
        if (disk / "latest").read_text() != "global_step200":
            broken.append("the last checkpoint was not saved")
        return Outcome(fault="", tried=1, message=lines[0].strip(), broken=tuple(broken))


def _ends(run: Launch, folder: Path, latest: str | None, words: str) -> Outcome:
    """Wait for the end, and check that one line has the reason and that checkpoints are whole."""
    end, disk, broken = ending(run), folder / "checkpoints", []
    if words not in (end.lines or [""])[0]:
        broken.append(f"it does not say {words!r}")
    if (left := sorted(path.name for path in disk.glob("*.partial"))) and not os.statvfs(disk).f_flag & os.ST_RDONLY:
        broken.append(f"{left[0]} was left")
    if (disk / "latest").exists():
        tag = (disk / "latest").read_text()
        broken += [f"latest is {tag}"] * (latest not in (None, tag)) + _faults_of(disk / tag)
    outcome = end.outcome("", code=2, lines=end.lines, broken=broken)
    return replace(outcome, message=outcome.message.replace(str(folder), ""))


def _faults_of(directory: Path) -> list[str]:
    from megatron_terapipe.checkpoint.manifest import Manifest
    from megatron_terapipe.errors import CheckpointError

    try:
        manifest = Manifest.read(directory)
        manifest.check_sizes(directory)
        manifest.check_content(directory, manifest.files)
    except CheckpointError as error:
        return [str(error)]
    return []


def _ranks(run: Launch) -> list[psutil.Process]:
    found = (psutil.Process(pid) for pid in run.survivors())
    return [each for each in found if str(PRETRAIN) in each.cmdline() and "--local_rank" in " ".join(each.cmdline())]


@contextmanager
def _disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes, as the folder of checkpoints."""
    disk = folder / "checkpoints"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        while disk.is_mount():
            subprocess.run(["umount", "--lazy", disk], check=True)


def _mount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", options, disk], check=True)


def _make_read_only(disk: Path) -> None:
    """Let files be opened for reading only: by a mount above, because the lock of the run stays open for writing."""
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    _mount(disk, "remount,bind,ro")
