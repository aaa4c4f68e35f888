"""Saved checkpoints are whole or have no name; faults are one line, the same on all ranks, and leave the one before."""

import resource
import shutil
import time
from collections import namedtuple
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_terapipe.checkpoint import save as saving
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.save import BackgroundSaves, begin_save
from megatron_terapipe.checkpoint.verify import find_checkpoint, verify_checkpoint
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.training.build_engine import build_engine
from tests.checkpoint.damage import DAMAGE, kinds_of_file
from tests.checkpoint.runs import Way, batches, info_of, run_of, save_checkpoint
from tests.distributed import run_distributed

WAY = Way(2, "--zero-stage 1")


def _save_weights(folder: Path) -> None:
    """On every rank: save with and without the optimizer, and load the weights only."""
    run = run_of(WAY)
    engine, info = build_engine(run), info_of(run)
    for name, optimizer in (("with", info.optimizer), ("without", None)):
        save_checkpoint(engine, folder / name, replace(info, optimizer=optimizer))
    run = run_of(replace(WAY, flags=f"{WAY.flags} --no-load-optim"), folder / "without")
    build_engine(run)
    config = replace(run.config.checkpoint, no_load_optim=False)
    with pytest.raises(CheckpointError, match="no state of the optimizer"):
        find_checkpoint(config, run.config.model, run.layout, "adam")


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    run_distributed(_save_weights, 2, tmp_path)
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(f"{each}/*/*.pt")) for each in ("with", "without")]
    assert not list((tmp_path / "without").rglob("*optim_states*"))
    assert sizes[1] < 0.6 * sizes[0]


Usage = namedtuple("Usage", "total used free")


@dataclass
class Seen:
    """Results of a rank."""

    differing: list[str] = field(default_factory=list)
    """Files that a background save wrote otherwise than a plain one."""
    moved_early: bool = False
    """Whether `latest` moved before all ranks had written."""
    refusals: list[str] = field(default_factory=list)
    """Lines about saves that failed."""
    left: list[set[str]] = field(default_factory=list)
    """Names in the directory of checkpoints after each of them."""
    damage: dict[tuple[str, str], str] = field(default_factory=dict)
    """Lines about damaged checkpoints, by damage and file."""


def _save_and_fail(folder: Path) -> Seen:
    """On every rank: save in both ways, fail to save in three, and load damaged files."""
    seen, run = Seen(), run_of(WAY)
    engine, info = build_engine(run), info_of(run)
    own = dist.get_rank()

    def step(number: int) -> None:
        engine.train_batch(iter(batches(number, own, 2)))

    step(0)
    plain = save_checkpoint(engine, folder / "plain", info)
    background = BackgroundSaves()
    unfinished = begin_save(engine, folder / "background", info, in_memory=True)
    seen.moved_early = (folder / "background" / "latest").exists()
    background.start(unfinished)
    step(1)  # Not part of the checkpoint in flight.
    while not background.is_done():
        time.sleep(0.01)
    background.finish()
    names = {path.name for path in (*plain.iterdir(), *unfinished.directory.iterdir())}
    seen.differing = [
        name for name in names if (plain / name).read_bytes() != (unfinished.directory / name).read_bytes()
    ]

    later = replace(info, iteration=info.iteration + 1, consumed_samples=info.consumed_samples + 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail(action) -> None:
        try:
            action()
        except CheckpointError as error:
            seen.refusals.append(str(error))
        dist.barrier()
        seen.left.append({path.name for path in (folder / "plain").iterdir()})

    if own == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    fail(lambda: save_checkpoint(engine, folder / "plain", later))
    background.start(begin_save(engine, folder / "plain", later, in_memory=True))
    fail(background.finish)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with patch.object(saving, "disk_usage", lambda path: Usage(100_000, 99_000, 1000)):
        fail(lambda: save_checkpoint(engine, folder / "plain", later))
    save_checkpoint(engine, folder / "plain", later)

    directory = folder / "plain" / f"global_step{info.iteration}"
    # Each damage once, to each kind of file at least once; all pairs are tried by tests/faults/campaigns/damage.py.
    for damage, kind in zip(DAMAGE, islice(cycle(sorted(kinds_of_file(directory))), len(DAMAGE)), strict=True):
        seen.damage[damage, kind] = refusal(directory, damage, kind, info)
    return seen


def refusal(directory: Path, damage: str, kind: str, info: CheckpointInfo) -> str:
    """The line about a checkpoint of which a file is damaged; the file is put back."""
    file, kept = kinds_of_file(directory)[kind], directory.parent / "kept"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copy(file, kept)
        DAMAGE[damage](file)
    dist.barrier()
    try:
        verify_checkpoint(directory, info, run_of(WAY).config.model, weights_only=False)
        return ""
    except CheckpointError as error:
        return str(error)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            file.with_name(f"{file.name}.old").unlink(missing_ok=True)
            kept.replace(file)
        dist.barrier()


def test_ranks_save_and_load(tmp_path: Path) -> None:
    first, second = run_distributed(_save_and_fail, 2, tmp_path)
    for seen in (first, second):
        assert seen.differing == []
        assert not seen.moved_early
        # One line, on both ranks the same, and no partial file remains.
        assert seen.refusals == first.refusals
        assert seen.left == [{"global_step2", "latest"}] * 3
        assert seen.damage == first.damage
    full, full_in_background, no_room = first.refusals
    for line in (full, full_in_background):
        assert line.startswith(f"checkpoint {tmp_path}/plain/global_step3 was not saved (rank 1, ")
        assert "File too large): make room or fix " in line
    assert no_room.startswith("a checkpoint of ")
    assert f"has no room in {tmp_path}/plain, where 1 kB are free: make room, or name another --save" in no_room
    assert latest_checkpoint(tmp_path / "plain") == tmp_path / "plain" / "global_step3"
    for (damage, kind), line in first.damage.items():
        assert kind in line, (damage, kind, line)
        assert "\n" not in line
        assert ("lacks" if damage in ("renamed", "deleted") else "is damaged: ") in line
    assert len(first.damage) == len(DAMAGE)
