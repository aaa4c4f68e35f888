"""The page in which the ranks of a host say how they are."""

import os
from pathlib import Path

import pytest

from deepspeed_ext.runtime.health.processes import HostRank, HostRanks, Mark


def test_ranks_read_what_others_write_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "page"
    pages = [HostRanks(path, 2), HostRanks(path, 2)]
    pages[0].write(0, HostRank(4, 100, Mark.HERE))
    assert pages[1].read() == {0: HostRank(4, 100, Mark.HERE)}
    assert path.exists(), "the other rank has yet to come"
    pages[1].write(1, HostRank(5, 101, Mark.HERE))
    pages[0].write(0, HostRank(4, 100, Mark.ENDING))
    assert pages[1].read() == {0: HostRank(4, 100, Mark.ENDING), 1: HostRank(5, 101, Mark.HERE)}
    assert not path.exists()
    assert pages[0].read()[1].rank == 5


def test_a_page_is_its_users_alone_and_follows_no_link(tmp_path: Path) -> None:
    HostRanks(tmp_path / "page", 2)
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600
    (tmp_path / "precious").write_text("precious")
    os.symlink(tmp_path / "precious", tmp_path / "link")
    with pytest.raises(OSError, match="link"):
        HostRanks(tmp_path / "link", 2)
    assert (tmp_path / "precious").read_text() == "precious"
