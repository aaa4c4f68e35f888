"""Arrays kept on disk: found again, never half there, computed once, and rewritten where damaged."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_terapipe.data import file_arrays
from megatron_terapipe.data.file_arrays import Arrays, FileColumn, IndexCache, ReadFile
from megatron_terapipe.errors import DataError
from tests.hostile_files import hostile_array

DESCRIPTION = {"kind": "squares", "size": 5}
NAMES = ("number", "square")


class Squares:
    """Computes, and counts how often."""

    def __init__(self, size: int = 5) -> None:
        self.size, self.calls = size, 0

    def __call__(self) -> Arrays:
        self.calls += 1
        numbers = np.arange(self.size, dtype=np.int64)
        return {"number": numbers, "square": (numbers**2).astype(np.float32)}


def values(arrays: Arrays) -> list[list[float]]:
    return [arrays["number"][:].tolist(), arrays["square"][:].tolist()]


SQUARES = [[0, 1, 2, 3, 4], [0.0, 1.0, 4.0, 9.0, 16.0]]


def test_computed_arrays_are_found_by_their_description(tmp_path: Path) -> None:
    compute = Squares()
    for _ in range(2):
        arrays = IndexCache(tmp_path / "deep" / "cache").get(DESCRIPTION, NAMES, compute)
        assert values(arrays) == SQUARES
        assert isinstance(arrays["number"], FileColumn)
    assert compute.calls == 1
    other = IndexCache(tmp_path / "deep" / "cache").get(DESCRIPTION | {"size": 2}, NAMES, Squares(2))
    assert values(other) == [[0, 1], [0.0, 1.0]]


def test_without_a_directory_arrays_are_computed_each_time() -> None:
    compute, cache = Squares(), IndexCache(None)
    assert values(cache.get(DESCRIPTION, NAMES, compute)) == values(cache.get(DESCRIPTION, NAMES, compute)) == SQUARES
    assert compute.calls == 2
    assert not cache.keeps


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def put_another_array_in_its_place(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(3))


def make_each_number_a_record(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'<i8"', b'<i8,"') + b" ")


def rename_an_array(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"number", b"numbed") + b" ")


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, truncate, put_another_array_in_its_place, change_a_bit, make_each_number_a_record, rename_an_array],
)
@pytest.mark.parametrize("pattern", ["*-number.npy", "*-square.npy", "*.json"])
def test_damaged_entries_are_computed_again(tmp_path: Path, pattern: str, damage: Callable[[Path], None]) -> None:
    compute, cache = Squares(), IndexCache(tmp_path)
    cache.get(DESCRIPTION, NAMES, compute)
    (path,) = tmp_path.glob(pattern)
    damage(path)
    assert values(cache.get(DESCRIPTION, NAMES, compute)) == SQUARES
    assert compute.calls == 2
    assert values(cache.get(DESCRIPTION, NAMES, compute)) == SQUARES
    assert compute.calls == 2


def test_a_pickle_in_place_of_an_array_is_not_read(tmp_path: Path) -> None:
    compute, cache = Squares(), IndexCache(tmp_path / "cache")
    cache.get(DESCRIPTION, NAMES, compute)
    for path in (tmp_path / "cache").glob("*.npy"):
        hostile_array(path, tmp_path / "hit")
    assert values(cache.get(DESCRIPTION, NAMES, compute)) == SQUARES
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_user_gives(tmp_path: Path, umask: int, mode: int) -> None:
    tmp_path.chmod(0o777)  # The permissions of the folder do not matter.
    before = os.umask(umask)
    try:
        IndexCache(tmp_path).get(DESCRIPTION, NAMES, Squares())
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def test_an_interruption_leaves_no_partial_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = np.save, []

    def dies(file: object, array: np.ndarray, **keywords: bool) -> None:
        saved.append(array)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(file, array, **keywords)

    monkeypatch.setattr(np, "save", dies)
    compute, cache = Squares(), IndexCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.get(DESCRIPTION, NAMES, compute)
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob("*.json"))
    monkeypatch.undo()
    assert values(cache.get(DESCRIPTION, NAMES, compute)) == SQUARES


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"^--data-cache-path .*/file cannot be written \(.*\): name another, or"):
        IndexCache(tmp_path / "file").get(DESCRIPTION, NAMES, Squares())


def test_the_entry_of_other_data_is_computed_again(tmp_path: Path) -> None:
    """As if a folder was copied together from several."""
    one, other = IndexCache(tmp_path / "one"), IndexCache(tmp_path / "other")
    one.get(DESCRIPTION, NAMES, Squares())
    other.get(DESCRIPTION | {"size": 2}, NAMES, Squares(2))
    for end in (".json", "-number.npy", "-square.npy"):
        (target,), (source,) = (list((tmp_path / folder).glob(f"*{end}")) for folder in ("one", "other"))
        target.write_bytes(source.read_bytes())
    assert values(one.get(DESCRIPTION, NAMES, Squares())) == SQUARES


def test_waiting_for_a_stopped_process_with_the_lock_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_arrays, "_SILENT_S", 0.05)
    monkeypatch.setattr(file_arrays, "_PATIENCE_S", 0.3)
    with (tmp_path / ".lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert values(IndexCache(tmp_path).get(DESCRIPTION, NAMES, Squares())) == SQUARES
    assert capsys.readouterr().err == f"waiting for another process that fills {tmp_path}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_entry_is_read_from_a_folder_without_write_permission(tmp_path: Path) -> None:
    IndexCache(tmp_path).get(DESCRIPTION, NAMES, Squares())
    tmp_path.chmod(0o500)
    assert values(IndexCache(tmp_path).get(DESCRIPTION, NAMES, Squares())) == SQUARES


RACER = """
import sys, time
from pathlib import Path
import numpy as np
from megatron_terapipe.data.file_arrays import FileColumn
from megatron_terapipe.data.file_arrays import IndexCache

folder, name = Path(sys.argv[1]), sys.argv[2]

def compute(size):
    (folder / f"computed-{size}-by-{name}").touch()
    time.sleep(0.2)
    return {"number": np.arange(100_000)}

print("ready", flush=True)
sys.stdin.readline()
for size in range(3):
    number = IndexCache(folder / "cache").get({"size": size}, ("number",), lambda: compute(size))["number"]
    assert number[:].tolist() == list(range(100_000))
"""


def test_of_many_processes_at_once_each_array_is_computed_by_one(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    assert [racer.wait(60) for racer in racers] == [0, 0, 0, 0]
    assert len(list((tmp_path / "cache").glob("*.json"))) == 3
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 3
    assert not list((tmp_path / "cache").glob("*.partial"))
    assert [len(list(tmp_path.glob(f"computed-{size}-by-*"))) for size in range(3)] == [1, 1, 1]


def test_few_files_stay_open_and_the_others_are_the_same_when_they_are_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_arrays, "_MOST_OPEN", 6)
    kept = file_arrays._OpenFiles()
    monkeypatch.setattr(file_arrays, "_open_files", lambda: kept)
    before = len(os.listdir("/proc/self/fd"))
    paths = [tmp_path / str(number) for number in range(9)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 8)
    files = [ReadFile(path) for path in paths]
    for _ in range(2):
        assert [file.read(4, 1)[0] for file in files] == list(range(9))
        assert len(os.listdir("/proc/self/fd")) == before + 3
    for path in (paths[0], paths[8]):
        path.unlink()
        path.write_bytes(bytes(9))
    assert files[8].read(0, 1) == b"\x08"  # It is open.
    with pytest.raises(DataError, match=r"/0 has been written since it was first opened: bring back the file that"):
        files[0].read(0, 1)
    del files
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files_are_one_line_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(DataError, match=r"\(Too many open files\): raise the limit of this process, `ulimit -n`"):
        ReadFile(tmp_path / "any")
