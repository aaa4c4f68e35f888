"""Lines of plain and compressed files: the same lines, and damage that is not taken for the end."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_terapipe.data.preprocess import read_lines
from megatron_terapipe.errors import DataError

# Larger than what is read at once, also when compressed.
LINES = [f"{number} {hash((number, 1)) % 10**18}\n".encode() for number in range(30_000)] + [b"no line end"]
CONTENT = b"".join(LINES)


def plain(content: bytes) -> bytes:
    return content


def zstandard(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(content))


def zstandard_frames(content: bytes) -> bytes:
    return b"".join(zstandard(content[start : start + 100_000]) for start in range(0, len(content), 100_000))


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("jsonl", plain), ("jsonl.gz", gzip.compress), ("jsonl.zst", zstandard), ("jsonl.zst", zstandard_frames)],
)
def test_lines_come_in_runs_with_their_numbers(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(compress(CONTENT))
    runs = list(read_lines(path))
    assert [line for run in runs for line in run.lines] == LINES
    assert len(runs) > 2
    assert [run.first for run in runs] == [1 + sum(len(each.lines) for each in runs[:n]) for n in range(len(runs))]
    positions = [run.file_position for run in runs]
    assert positions == sorted(positions)
    assert positions[-1] == path.stat().st_size


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard), ("zst", zstandard_frames)])
def test_a_file_cut_short_is_no_shorter_file(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"corpus.jsonl.{suffix}"
    path.write_bytes(compress(CONTENT)[:-20])
    with pytest.raises(DataError, match=rf"^cannot read --input .*\.{suffix} \(.+\): give a file"):
        list(read_lines(path))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_compressed_is_named(tmp_path: Path, suffix: str) -> None:
    if suffix == "zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"corpus.jsonl.{suffix}"
    path.write_bytes(CONTENT)
    with pytest.raises(DataError, match=rf"^cannot read --input .*\.{suffix} \(.+\): give a file"):
        list(read_lines(path))


@pytest.mark.parametrize(("suffix", "compress"), [("jsonl", plain), ("gz", gzip.compress), ("zst", zstandard)])
def test_an_empty_file_has_no_lines(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"corpus.{suffix}"
    path.write_bytes(compress(b""))
    assert list(read_lines(path)) == []


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        DataError, match=r"needs the package zstandard, .*: pip install zstandard .extra: data., or decompress"
    ):
        list(read_lines(path))
