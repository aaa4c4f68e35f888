"""Rotation keeps whole checkpoints, and whatever is not one."""

from pathlib import Path

from megatron_terapipe.checkpoint.directories import (
    keep_aside,
    latest_checkpoint,
    passed_over,
    previous_tag,
    remove_older,
)
from tests.checkpoint.killed_saves import found, save


def tags(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def damage(folder: Path, iteration: int) -> None:
    (folder / f"global_step{iteration}" / "layer_00-model_00-model_states.pt").write_bytes(b"")


def test_a_damaged_checkpoint_does_not_count_and_stays(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration)
    damage(tmp_path, 3)
    remove_older(tmp_path, 4, 2)
    assert tags(tmp_path) == {"global_step2", "global_step3", "global_step4"}


def test_the_last_good_one_stays_where_the_newest_is_damaged(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    damage(tmp_path, 3)
    remove_older(tmp_path, 3, 1)
    assert tags(tmp_path) == {"global_step2", "global_step3"}


def test_a_damaged_checkpoint_is_kept_aside_under_a_name_of_its_own(tmp_path: Path) -> None:
    for iteration in (2, 4):
        save(tmp_path, iteration)
    first, damaged = tmp_path / "global_step2", tmp_path / "global_step4"
    assert previous_tag(tmp_path, None) == "global_step2"
    assert passed_over(first, None) == [damaged]
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
