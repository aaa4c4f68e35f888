"""Data that another tokenizer wrote is found by its ids, and by its record, before anything is trained."""

import hashlib
import json
import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.data import tokenizer_checks as module
from megatron_terapipe.data.file_arrays import IndexCache
from megatron_terapipe.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_terapipe.data.preprocess import main
from megatron_terapipe.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, build_tokenizer
from megatron_terapipe.data.tokenizer_checks import (
    TokenizerRecord,
    check_token_ids,
    check_tokenizer_records,
    record_file,
    token_range,
)
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face


def write(prefix: Path, *documents: list[int], vocab_size: int = 50257) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return prefix


def test_the_range_is_that_of_the_whole_file_whatever_the_pieces(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", [3, 1, 50256], [7] * 100, [2])
    for size in (1, 7, 1 << 24):
        with patch.object(module, "_TOKENS_AT_ONCE", size), patch.object(module, "_KEPT_FROM", size % 7):
            assert token_range(str(prefix), IndexCache(None)) == (0, 50256)


def test_it_is_read_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_FROM", 0)
    prefix, cache = write(tmp_path / "c", [1, 2]), IndexCache(tmp_path / "cache")
    assert token_range(str(prefix), cache) == (0, 2)
    with patch.object(module, "_range", side_effect=AssertionError("read again")):
        assert token_range(str(prefix), cache) == (0, 2)
    # Also of the same size and time.
    written = os.stat(f"{prefix}.bin").st_mtime_ns
    write(prefix, [1, 5])
    os.utime(f"{prefix}.bin", ns=(written, written))
    assert token_range(str(prefix), cache) == (0, 5)


@pytest.mark.parametrize(("ids", "wrong"), [([1, 257, 50256], 257), ([5, -3], -3)])
def test_ids_that_the_tokenizer_does_not_have_are_one_line(tmp_path: Path, ids: list[int], wrong: int) -> None:
    fine, other = write(tmp_path / "fine", [0, 256]), write(tmp_path / "other", ids, vocab_size=1 << 20)
    assert IndexedDataset(other).dtype == np.int32
    check_token_ids([str(fine)], ByteTokenizer(), IndexCache(None))
    with pytest.raises(DataError) as raised:
        check_token_ids([str(fine), str(other)], ByteTokenizer(), IndexCache(None))
    assert str(raised.value) == (
        f"{other}.bin has the token id {wrong} at byte 4, and the vocabulary of --tokenizer-type byte has 257 ids from "
        "0: give the tokenizer that the data was preprocessed with"
    )


TEXTS = ["Hello world", "  two words, caf\u00e9\n", "x" * 5000]


def preprocess(folder: Path, *options: str, texts: list[str] = TEXTS) -> str:
    lines = folder / "c.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["--input", str(lines), "--output-prefix", str(folder / "c"), *options]) == 0
    return str(folder / "c_text_document")


def built(file: Path) -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file)))


def check(prefix: str, tokenizer: Tokenizer, *, reads_ends: bool = False) -> None:
    check_tokenizer_records([prefix], tokenizer, reads_ends=reads_ends)


def test_data_of_bytes_is_refused_under_a_larger_vocabulary_though_all_ids_are_in_it(tmp_path: Path) -> None:
    prefix, other = preprocess(tmp_path, "--append-eod"), built(train_hugging_face(tmp_path))
    assert other.vocab_size > ByteTokenizer.vocab_size
    check(prefix, ByteTokenizer(), reads_ends=True)
    with pytest.raises(DataError) as raised:
        check(prefix, other)
    assert str(raised.value) == (
        f"{prefix}.bin was tokenized with byte of 257 ids, which are another text to --tokenizer-type "
        f"HuggingFaceTokenizer of {other.vocab_size} ids: give the tokenizer of the data, or preprocess the texts "
        f"again ({prefix}.tokenizer.json has the record)"
    )


def test_vocabularies_of_one_size_are_distinguished_and_more_special_tokens_are_no_other_one(tmp_path: Path) -> None:
    file = train_hugging_face(tmp_path)
    prefix = preprocess(
        tmp_path, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(file), "--append-eod"
    )
    check(prefix, built(file), reads_ends=True)
    with pytest.raises(DataError, match=r"with HuggingFaceTokenizer of .* another text to .* byte of 257"):
        check(prefix, ByteTokenizer())
    described = json.loads(file.read_text())
    added = {**described["added_tokens"][0], "id": built(file).vocab_size, "content": "<pad>"}
    described["added_tokens"].append(added)
    file.write_text(json.dumps(described))
    assert built(file).vocab_size == TokenizerRecord.read(prefix).vocab_size + 1
    check(prefix, built(file), reads_ends=True)
    ids = described["model"]["vocab"]
    ids["x"], ids["y"] = ids["y"], ids["x"]
    file.write_text(json.dumps(described))
    with pytest.raises(DataError, match="another text"):
        check(prefix, built(file))


def test_ids_without_a_tokenizer_are_compared_by_the_end_of_documents_where_it_counts(tmp_path: Path) -> None:
    prefix = preprocess(tmp_path, "--append-eod")
    check(prefix, NullTokenizer(256), reads_ends=True)
    check(prefix, NullTokenizer(50000))
    with pytest.raises(DataError, match="its documents end with 256, but with 50000 by --tokenizer-type NullTokenizer"):
        check(prefix, NullTokenizer(50000), reads_ends=True)
    without = preprocess(tmp_path)
    check(without, NullTokenizer(50000), reads_ends=True)


def test_a_damaged_data_file_is_found_where_it_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = preprocess(tmp_path, texts=["x" * 9000])
    data, record = Path(f"{prefix}.bin"), record_file(prefix)
    content, written = data.read_bytes(), json.loads(record.read_text())
    assert written["sha256"] == hashlib.sha256(content).hexdigest()
    capsys.readouterr()

    def verify() -> None:
        check_tokenizer_records([prefix], ByteTokenizer(), reads_ends=False, verifies=True)

    verify()
    data.write_bytes(content[:12288] + bytes(4096) + content[16384:])  # A page of zeros, which are ids.
    check(prefix, ByteTokenizer())
    with pytest.raises(DataError, match=r"c_text_document\.bin is damaged: its SHA-256 is not the one in .*: put both"):
        verify()
    assert capsys.readouterr().err == ""
    record.unlink()
    verify()
    line = f"warning: {data} was not verified: preprocess has written no hash of it\n"
    assert capsys.readouterr().err == line


def test_data_of_others_has_no_record_and_a_record_of_other_data_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = built(train_hugging_face(tmp_path))
    prefix = preprocess(tmp_path)
    size = Path(f"{prefix}.bin").stat().st_size // 2
    with IndexedDatasetWriter(prefix, 257) as writer:  # As Megatron would, in the place of ours.
        writer.add_document([7] * size)
    capsys.readouterr()
    check(prefix, other)
    assert capsys.readouterr().err == (
        f"warning: {prefix}.tokenizer.json is not of this {prefix}.bin, so the tokenizer was not checked: remove it\n"
    )
    record_file(prefix).unlink()
    check(prefix, other)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer": "byte"}', "{"])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    prefix = preprocess(tmp_path)
    record_file(prefix).write_text(text)
    with pytest.raises(UserError, match=r"c_text_document\.tokenizer\.json"):
        check(prefix, ByteTokenizer())
