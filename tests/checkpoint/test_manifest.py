"""The manifest names files that changed; rotation keeps whole checkpoints and foreign directories."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_terapipe.checkpoint.directories import (
    keep_aside,
    latest_checkpoint,
    previous_tag,
    remove_older,
    skipped_checkpoints,
)
from megatron_terapipe.checkpoint.manifest import FileFacts, Manifest, write_durably
from megatron_terapipe.checkpoint.verify import shares
from megatron_terapipe.errors import CheckpointError
from tests.checkpoint.killed_saves import found, save

NAMES = ("layer_00.pt", "layer_01.pt", "run.json")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three files and their manifest."""
    directory = tmp_path / "global_step5"
    directory.mkdir()
    files = {name: write_durably(directory / name, name * 1000) for name in NAMES}
    write_durably(directory / "manifest.json", Manifest(files).text())
    return directory


def fault(directory: Path) -> str | None:
    """The fault, without the place and the remedy."""
    try:
        manifest = Manifest.read(directory)
        manifest.check_sizes(directory)
        manifest.check_content(directory, manifest.files)
    except CheckpointError as error:
        line = str(error)
        assert "\n" not in line
        assert line.startswith(f"checkpoint {directory} ")
        return line.removeprefix(f"checkpoint {directory} ").partition(": put")[0].partition(": move")[0]
    return None


def _flip(path: Path, offset: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shorter": (lambda d: (d / NAMES[1]).write_bytes(b"x" * 10_999), "{1} has 10999 bytes, and 11000 were saved"),
    "longer": (lambda d: (d / NAMES[1]).open("ab").write(b"x"), "{1} has 11001 bytes, and 11000 were saved"),
    "bit": (
        lambda d: _flip(d / NAMES[0], 5000),
        "{0} has changed since it was saved, or manifest.json is of another checkpoint",
    ),
    "zeros": (
        lambda d: (d / NAMES[0]).write_bytes(bytes(11_000)),
        "{0} has changed since it was saved, or manifest.json is of another checkpoint",
    ),
    "run": (
        lambda d: _flip(d / "run.json", 3),
        "run.json has changed since it was saved, or manifest.json is of another checkpoint",
    ),
    "manifest": (lambda d: _flip(d / "manifest.json", 100), "manifest.json has changed since it was saved"),
    "no_manifest": (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json has changed since it was saved"),
}


@pytest.mark.parametrize(("damage", "said"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_file_is_named(directory: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(directory)
    assert fault(directory) == "is damaged: " + said.format(*NAMES)


def test_a_whole_checkpoint_has_no_fault(directory: Path) -> None:
    (directory / ".nfs0001").touch()
    assert fault(directory) is None


def test_missing_and_foreign_files_are_named(directory: Path) -> None:
    (directory / "notes.txt").touch()
    assert fault(directory) == "holds 'notes.txt', which was not saved with it"
    (directory / NAMES[0]).rename(directory / "renamed.pt")
    assert fault(directory) == f"lacks {NAMES[0]}"
    (directory / "manifest.json").unlink()
    assert fault(directory) == "lacks manifest.json"


def test_each_file_is_read_once_and_ranks_read_about_the_same() -> None:
    files = {f"file_{size}": FileFacts(size, "") for size in range(1, 100)}
    dealt = shares(files, 7)
    assert sorted(name for names in dealt for name in names) == sorted(files)
    sums = [sum(files[name].size for name in names) for names in dealt]
    assert max(sums) - min(sums) <= 10
    assert shares({}, 2) == [[], []]


def tags(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize(
    ("saved", "keep_last", "kept"), [((1, 2, 3, 4), 2, {2, 3, 4}), ((1, 2, 3), 1, {2, 3})], ids=["older", "newest"]
)
def test_the_newest_are_kept_and_a_damaged_one_does_not_count(
    tmp_path: Path, saved: tuple[int, ...], keep_last: int, kept: set[int]
) -> None:
    """Others' folders, and later checkpoints of a run that was set back, stay, too."""
    others = {"notes", "global_step0", "global_step9"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "global_step9" / "run.json").write_text("{}")
    for iteration in saved:
        save(tmp_path, iteration)
    (tmp_path / "global_step3" / "layer_00-model_00-model_states.pt").write_bytes(b"")
    remove_older(tmp_path, saved[-1], keep_last)
    assert tags(tmp_path) == {*others, *(f"global_step{each}" for each in kept)}


def test_a_damaged_checkpoint_is_kept_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    for iteration in (2, 4):
        save(tmp_path, iteration)
    first, damaged = tmp_path / "global_step2", tmp_path / "global_step4"
    assert previous_tag(tmp_path, None) == "global_step2"
    assert skipped_checkpoints(first, None) == [damaged]
    assert keep_aside(damaged, first).name == "global_step4.damaged"
    assert latest_checkpoint(tmp_path) == first
    save(tmp_path, 4)
    assert keep_aside(damaged, first).name == "global_step4.damaged1"
    save(tmp_path, 6, keep_last=1)
    assert tags(tmp_path) == {"global_step6", "global_step4.damaged", "global_step4.damaged1"}
    assert found(tmp_path).iteration == 6


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert previous_tag(tmp_path, "global_step2") is None
    assert previous_tag(tmp_path / "absent", None) is None
