"""A process that is killed while saving, at any access to the disk, leaves a whole checkpoint that is found."""

from pathlib import Path

import pytest

from megatron_terapipe.checkpoint.directories import latest_checkpoint
from tests.checkpoint.killed_saves import found, kill_at_every_point, killed_at


@pytest.fixture(autouse=True)
def _no_power_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a killed process are in the file without a sync, which takes most of the time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def test_killed_while_saving_over_the_latest(tmp_path: Path) -> None:
    """The same iteration again: `latest` always has its checkpoint. Others: tests/faults/campaigns/saving.py."""
    points, iterations = kill_at_every_point(tmp_path, [2, 6], 6, 1)
    assert points > 15
    assert iterations == {6}


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    point, killed, ends = 0, True, []
    while killed:
        folder = tmp_path / str(point)
        killed = killed_at(point, folder, 3, None)
        ends.append(latest_checkpoint(folder) is not None and found(folder).iteration)
        point += 1
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0, 3)
