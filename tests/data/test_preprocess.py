"""The command from JSON lines, compressed or not, to an indexed dataset, end to end; the processes that encode."""

import gzip
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_terapipe.data.indexed_dataset import IndexedDataset, data_file, index_file
from megatron_terapipe.data.preprocess import main, read_lines
from megatron_terapipe.data.tokenizer import ByteTokenizer, build_tokenizer
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.data.workers import WorkerProcesses, map_ahead
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face, train_sentence_piece

TEXTS = [f"document {number} " * (1 + number % 7) for number in range(5000)]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", *(json.dumps({"text": text}) for text in TEXTS))


def run(corpus: Path, prefix: Path, *options: str) -> int:
    return main(["--input", str(corpus), "--output-prefix", str(prefix), *options])


def texts_of(prefix: Path) -> list[str]:
    dataset = IndexedDataset(prefix)
    tokenizer = ByteTokenizer()
    return [tokenizer.decode(dataset.run(number, 0, 10**6).tolist()) for number in range(len(dataset))]


def test_two_workers_write_the_bytes_of_one(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(corpus, one, "--append-eod") == 0
    # The other flags are of Megatron's scripts, and change nothing.
    assert run(corpus, two, "--append-eod", "--workers", "2", "--dataset-impl", "mmap", "--log-interval", "9") == 0
    for file in (data_file, index_file):
        written = [file(f"{prefix}_text_document").read_bytes() for prefix in (one, two)]
        assert written[0] == written[1]
    assert texts_of(tmp_path / "one_text_document") == TEXTS
    assert IndexedDataset(tmp_path / "two_text_document").run(0, 0, 10**6)[-1] == ByteTokenizer.eod
    tokens = sum(len(text) + 1 for text in TEXTS)
    summary = capsys.readouterr().out.splitlines()[0]
    assert summary.startswith(f"wrote {one}_text_document (.bin and .idx): 5,000 documents, ")
    assert f"{tokens:,} tokens" in summary
    assert re.search(r" s \([\d,]+ documents/s, [\d.]+ MB/s\)$", summary)


def test_each_json_key_has_its_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"title": "one", "text": "first"}, {"title": "two", "text": "second", "more": 3}]
    corpus = write_lines(tmp_path / "c.jsonl", *map(json.dumps, lines))
    assert run(corpus, tmp_path / "deeper" / "c", "--json", "--json-keys", "title", "text") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") > 0
    assert found == {
        "datasets": [
            {"prefix": f"{tmp_path}/deeper/c_title_document", "num_documents": 2, "num_tokens": 6},
            {"prefix": f"{tmp_path}/deeper/c_text_document", "num_documents": 2, "num_tokens": 11},
        ],
        "num_empty_texts": 0,
        "tokenizer": "byte",
        "num_bytes": corpus.stat().st_size,
        "num_invalid_lines": 0,
        "first_invalid_lines": [],
    }
    assert texts_of(tmp_path / "deeper" / "c_title_document") == ["one", "two"]
    assert texts_of(tmp_path / "deeper" / "c_text_document") == ["first", "second"]


@pytest.mark.parametrize(
    ("spelling", "name", "train"),
    [
        ("HuggingFaceTokenizer", "HuggingFaceTokenizer", train_hugging_face),
        ("HFTokenizer", "HuggingFaceTokenizer", train_hugging_face),
        ("Llama2Tokenizer", "SentencePieceTokenizer", train_sentence_piece),
    ],
)
def test_every_tokenizer_under_every_name(
    tmp_path: Path, spelling: str, name: str, train: Callable[[Path], Path]
) -> None:
    model = train(tmp_path)
    texts = ["Hello world", "caf\u00e9 </s> <|endoftext|>"] * 2000
    corpus = write_lines(tmp_path / "c.jsonl", *(json.dumps({"text": text}) for text in texts))
    options = ["--tokenizer-type", spelling, "--tokenizer-model", str(model), "--append-eod", "--workers", "2"]
    assert run(corpus, tmp_path / "c", *options) == 0
    dataset = IndexedDataset(tmp_path / "c_text_document")
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type=name, tokenizer_model=str(model)))
    assert len(dataset) == len(texts)
    for number in (0, 1, len(texts) - 1):
        *ids, last = dataset.run(number, 0, 10**6).tolist()
        assert tokenizer.decode(ids) == texts[number]
        assert last == tokenizer.eod
        assert tokenizer.eod not in ids


def test_texts_of_ids_need_no_tokenizer(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "ids.jsonl", '{"text": "3 1 2"}', '{"text": "70000"}')
    options = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70002", "--append-eod"]
    assert run(corpus, tmp_path / "ids", *options) == 0
    dataset = IndexedDataset(tmp_path / "ids_text_document")
    assert [dataset.run(number, 0, 10**6).tolist() for number in range(2)] == [[3, 1, 2, 70001], [70000, 70001]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split-sentences"], "error: --split-sentences is for BERT"),
        (["--json-keys", "text", "text"], "error: --json-keys text text names a key twice"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "error: HuggingFaceTokenizer needs --tokenizer-model"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "error: GPT2BPETokenizer needs --vocab-file"),
        (["--tokenizer-type", "BERT"], "argument --tokenizer-type"),
        (["--workers", "0"], "argument --workers"),
        (["--output-prefix", "folder/"], "argument --output-prefix: 'folder/' is a folder: name the files in it, as "),
        (["--output-prefix", "/proc/x/c"], "error: --output-prefix /proc/x/c cannot be written (No such file or dir"),
        (["--workers", "100000"], "argument --workers: 100000 is not a whole number from 1 to 1,024: see "),
        (["--input", "absent.jsonl"], "error: --input absent.jsonl is not a file"),
    ],
)
def test_invalid_flags_are_named(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(corpus, tmp_path / "c", *options) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [corpus]


def test_blank_lines_and_empty_texts_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"text": "a"}', "", '{"text": ""}', '{"text": "b"}']
    assert run(write_lines(tmp_path / "c.jsonl", *lines), tmp_path / "c", "--append-eod") == 0
    assert texts_of(tmp_path / "c_text_document") == ["a", "b"]
    assert "2 documents and 1 empty texts left out, 4 tokens" in capsys.readouterr().out


def test_invalid_lines_are_left_out_counted_and_named_up_to_a_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"text": "a"}', '{"text": null}', "cut", '{"text": "b"}', *['{"text": 1}'] * 4]
    corpus = write_lines(tmp_path / "c.jsonl", *lines)
    assert run(corpus, tmp_path / "c", "--skip-invalid", "6") == 0
    assert texts_of(tmp_path / "c_text_document") == ["a", "b"]
    found = capsys.readouterr()
    assert "2 documents, 6 invalid lines left out, 2 tokens" in found.out
    named = [line.split(": ")[:2] for line in found.err.splitlines()]
    assert named == [["left out", f"{corpus}:{number}"] for number in (2, 3, 5, 6, 7)]
    assert run(corpus, tmp_path / "d", "--skip-invalid", "5") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {corpus}:8: 'text' is a number") and "--skip-invalid 5" in error


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_malformed_line_is_named_and_no_file_remains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    lines = ['{"text": "fine"}'] * 9000 + ['{"text": "cut'] + ['{"text": "fine"}'] * 9000
    corpus = write_lines(tmp_path / "c.jsonl", *lines)
    assert run(corpus, tmp_path / "c", "--workers", workers) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {corpus}:9001: not JSON (")
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"body": "x"}\n', "c.jsonl:1: no text under the key 'text', only the keys ['body']"),
        (b'{"text": "x"}\n{"text": 5}\n', "c.jsonl:2: 'text' is a number, not text: repair the line, or leave up to"),
        (b'{"text": null}\n', "c.jsonl:1: 'text' is null, not text"),
        (b'{"text": ["a", "b"]}\n', "c.jsonl:1: 'text' is a list, not text"),
        (b'{"text": {"a": "b"}}\n', "c.jsonl:1: 'text' is an object, not text"),
        (b'["text"]\n', "c.jsonl:1: JSON but no object"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "c.jsonl:2: not UTF-8 (byte 10 of the line is 0xff): convert the file"),
        (b'{"text": "a"}\n{"text": ' + b"[" * 100_000, "c.jsonl:2: not JSON ("),
        (b'{"text": "a"}\n{"text": ' + b"7" * 5000 + b"}", "c.jsonl:2: not JSON (Exceeds the limit (4300 digits)"),
        (b"\n\n", "c.jsonl holds no text"),
        (b"", "c.jsonl holds no text"),
    ],
)
def test_input_that_cannot_be_used_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(content)
    assert run(corpus, tmp_path / "c") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error


# Larger than one read, also when compressed.
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


@pytest.mark.parametrize(
    ("suffix", "damaged"),
    [
        ("gz", lambda: gzip.compress(CONTENT)[:-20]),
        ("zst", lambda: zstandard(CONTENT)[:-20]),
        ("zst", lambda: zstandard_frames(CONTENT)[:-20]),
        ("gz", lambda: CONTENT),
        ("zst", lambda: zstandard(b"") and CONTENT),
    ],
    ids=["gz cut short", "zst cut short", "frames cut short", "not gz", "not zst"],
)
def test_a_damaged_file_is_no_shorter_file(tmp_path: Path, suffix: str, damaged: Callable[[], bytes]) -> None:
    path = tmp_path / f"corpus.jsonl.{suffix}"
    path.write_bytes(damaged())
    with pytest.raises(DataError, match=rf"^cannot read --input .*\.{suffix} \(.+\): give a file"):
        list(read_lines(path))


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        DataError, match=r"needs the package zstandard, .*: pip install zstandard .extra: data., or decompress"
    ):
        list(read_lines(path))


def work(item: str) -> str:
    """Answer, fail or die, depending on the item."""
    if item == "fail":
        raise DataError("this item cannot be worked on")
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return item.upper()


def results(items: list[str]) -> list[str]:
    with WorkerProcesses(work, 2) as call, ThreadPoolExecutor(2) as threads:
        return list(map_ahead(threads, call, items, window=4))


def test_results_come_in_the_order_of_the_items_however_large() -> None:
    items = [letter * size for letter in "abc" for size in (1, 1 << 20)]
    assert results(items) == [item.upper() for item in items]


@pytest.mark.parametrize(("item", "message"), [("fail", "this item cannot"), ("die", "one of 2 workers was killed")])
def test_a_failure_or_a_death_is_raised(item: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        results(["a"] * 5 + [item] + ["b" * (1 << 20)] * 20)
