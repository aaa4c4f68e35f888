"""Data says which tokenizer wrote it, and another one is refused before anything is trained."""

import json
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.data.indexed_dataset import IndexedDatasetWriter
from megatron_terapipe.data.preprocess import main
from megatron_terapipe.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, TokenizerSettings, build_tokenizer
from megatron_terapipe.data.tokenizer_checks import TokenizerRecord, check_tokenizer_records, record_file
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face, train_sentence_piece

TEXTS = ["Hello world", "  two words, caf\u00e9\n", "x" * 5000]


def preprocess(folder: Path, *options: str, texts: list[str] = TEXTS) -> str:
    lines = folder / "c.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["--input", str(lines), "--output-prefix", str(folder / "c"), *options]) == 0
    return str(folder / "c_text_document")


def with_tokenizer(file: Path, name: str = "HuggingFaceTokenizer") -> list[str]:
    return ["--tokenizer-type", name, "--tokenizer-model", str(file)]


def built(file: Path, name: str = "HuggingFaceTokenizer") -> Tokenizer:
    return build_tokenizer(TokenizerSettings(tokenizer_type=name, tokenizer_model=str(file)))


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


def test_ids_outside_the_vocabulary_name_the_tokenizer_of_the_data(tmp_path: Path) -> None:
    prefix = preprocess(tmp_path, *with_tokenizer(train_hugging_face(tmp_path)))
    with pytest.raises(
        DataError, match=r"was tokenized with HuggingFaceTokenizer of .* another text to .* byte of 257"
    ):
        check(prefix, ByteTokenizer())


def test_vocabularies_of_one_kind_and_size_are_told_apart(tmp_path: Path) -> None:
    file = train_hugging_face(tmp_path)
    prefix = preprocess(tmp_path, *with_tokenizer(file))
    check(prefix, built(file))
    described = json.loads(file.read_text())
    ids = described["model"]["vocab"]
    ids["x"], ids["y"] = ids["y"], ids["x"]
    file.write_text(json.dumps(described))
    with pytest.raises(DataError, match="another text"):
        check(prefix, built(file))


def test_more_special_tokens_are_no_other_vocabulary(tmp_path: Path) -> None:
    file = train_hugging_face(tmp_path)
    prefix = preprocess(tmp_path, *with_tokenizer(file), "--append-eod")
    described = json.loads(file.read_text())
    added = {**described["added_tokens"][0], "id": built(file).vocab_size, "content": "<pad>"}
    described["added_tokens"].append(added)
    file.write_text(json.dumps(described))
    assert built(file).vocab_size == TokenizerRecord.read(prefix).vocab_size + 1
    check(prefix, built(file), reads_ends=True)


def test_sentence_piece_finds_its_own_data(tmp_path: Path) -> None:
    file = train_sentence_piece(tmp_path)
    prefix = preprocess(tmp_path, *with_tokenizer(file, "SentencePieceTokenizer"), "--append-eod")
    check(prefix, built(file, "SentencePieceTokenizer"), reads_ends=True)


def test_ids_without_a_tokenizer_are_compared_by_the_end_of_documents_where_it_counts(tmp_path: Path) -> None:
    prefix = preprocess(tmp_path, "--append-eod")
    check(prefix, NullTokenizer(256), reads_ends=True)
    check(prefix, NullTokenizer(50000))
    with pytest.raises(DataError, match="its documents end with 256, but with 50000 by --tokenizer-type NullTokenizer"):
        check(prefix, NullTokenizer(50000), reads_ends=True)
    without = preprocess(tmp_path)
    check(without, NullTokenizer(50000), reads_ends=True)


def test_data_of_others_has_no_record_and_a_record_of_other_data_does_not_count(tmp_path: Path) -> None:
    other = built(train_hugging_face(tmp_path))
    prefix = preprocess(tmp_path)
    size = Path(f"{prefix}.bin").stat().st_size // 2
    with IndexedDatasetWriter(prefix, 257) as writer:  # As Megatron would, in the place of ours.
        writer.add_document([7] * size)
    check(prefix, other)
    record_file(prefix).unlink()
    check(prefix, other)


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer": "byte"}', "{"])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    prefix = preprocess(tmp_path)
    record_file(prefix).write_text(text)
    with pytest.raises(UserError, match=r"c_text_document\.tokenizer\.json"):
        check(prefix, ByteTokenizer())
