"""Ranks on two hosts meet under launchers other than DeepSpeed's."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.end_to_end.hosts import meeting
from tests.end_to_end.hosts.network import SEARCH_PATH, Network
from tests.end_to_end.hosts.slurm import missing_slurm, slurm

pytestmark = [pytest.mark.hosts, pytest.mark.thorough]


def check(folder: Path, places: list[tuple[int, int]]) -> None:
    """Check that all ranks met, each on its place."""
    for rank, (local_rank, local_size) in enumerate(places):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        assert found["met"] == [each + 1 for each in range(len(places))]
        assert [int(each) for each in found["told"].values()] == [rank, len(places), local_rank, local_size]


def test_mpirun(two_hosts: Network, tmp_path: Path) -> None:
    if shutil.which("mpirun", path=SEARCH_PATH) is None:
        pytest.skip("not installed: mpirun")
    (tmp_path / "hostfile").write_text(two_hosts.hostfile())
    words = ["mpirun", "--allow-run-as-root", "-np", "2", "-hostfile", tmp_path / "hostfile"]
    words += ["-x", "PYTHONPATH", "-x", "DS_ACCELERATOR", sys.executable, meeting.__file__, tmp_path]
    done = two_hosts.hosts[0].run(words)
    assert done.returncode == 0, done.stdout
    check(tmp_path, [(0, 1), (0, 1)])


def test_srun(two_hosts: Network, tmp_path: Path) -> None:
    if reason := missing_slurm():
        pytest.skip(reason)
    (tmp_path / "slurm").mkdir()
    with slurm(two_hosts, tmp_path / "slurm") as variables:
        words = ["srun", "-N2", "-n3", sys.executable, meeting.__file__, tmp_path]
        done = two_hosts.hosts[0].run(words, **variables)
    assert done.returncode == 0, done.stdout
    check(tmp_path, [(0, 2), (1, 2), (0, 1)])
