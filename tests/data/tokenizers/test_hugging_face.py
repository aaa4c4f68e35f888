"""Tokenizers of Hugging Face: ids of the package itself, and nothing added, cut or taken for an end."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.data.subword_tokenizers import HuggingFaceTokenizer
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face

TEXT = "Hello world, hello caf\u00e9 \u4f60\u597d! unseen W\u00f6rter"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_hugging_face(tmp_path_factory.mktemp("trained"))


def test_ids_are_those_of_the_package_without_what_it_adds_or_cuts(file: Path) -> None:
    package = Tokenizer.from_file(str(file))
    assert len(package.encode(TEXT).ids) == 16, "the file does not ask for truncation and padding"
    package.no_truncation()
    package.no_padding()
    begin, *ids, end = package.encode(TEXT).ids
    tokenizer = HuggingFaceTokenizer(file)
    assert tokenizer.encode(TEXT) == ids
    assert (begin, end) == (1, tokenizer.eod)
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (300, 0, "HuggingFaceTokenizer")


def test_a_directory_stands_for_its_tokenizer(file: Path) -> None:
    assert HuggingFaceTokenizer(file.parent).encode(TEXT) == HuggingFaceTokenizer(file).encode(TEXT)


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(file: Path, text: str) -> None:
    tokenizer = HuggingFaceTokenizer(file)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_spells_a_special_token_is_text(file: Path) -> None:
    tokenizer = HuggingFaceTokenizer(file)
    ids = tokenizer.encode("a<|endoftext|>b<|begin|>")
    assert not {0, 1} & set(ids)
    assert tokenizer.decode(ids) == "a<|endoftext|>b<|begin|>"
    assert tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"


def test_a_lone_surrogate_becomes_a_question_mark(file: Path) -> None:
    tokenizer = HuggingFaceTokenizer(file)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("eod", ["</s>", "<|end_of_text|>", "<eos>"])
def test_the_end_of_a_document_is_found_by_its_usual_names(tmp_path: Path, eod: str) -> None:
    assert HuggingFaceTokenizer(train_hugging_face(tmp_path, eod)).eod == 0


@pytest.mark.parametrize("entry", ["<|begin|>", {"content": "<|begin|>", "lstrip": False}])
def test_the_configuration_names_the_end_of_a_document(tmp_path: Path, entry: object) -> None:
    file = train_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    assert HuggingFaceTokenizer(file).eod == 1


@pytest.mark.parametrize("content", ["{}", '{"eos_token": null}', "[]"])
def test_a_configuration_that_names_none_changes_nothing(tmp_path: Path, content: str) -> None:
    file = train_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert HuggingFaceTokenizer(file).eod == 0


def test_without_an_end_of_document_the_error_says_where_to_name_one(tmp_path: Path) -> None:
    file = train_hugging_face(tmp_path, eod="[END]")
    with pytest.raises(DataError, match=r"no token that ends a document .*<eos>\): name one .*tokenizer_config\.json"):
        HuggingFaceTokenizer(file)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"eos_token": "[STOP]"}')
    with pytest.raises(DataError, match=r"looked for \[STOP\], which tokenizer_config\.json names"):
        HuggingFaceTokenizer(file)
    config.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        HuggingFaceTokenizer(file)
    config.write_text('{"eos_token": "[END]"}')
    assert HuggingFaceTokenizer(file).eod == 0


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--tokenizer-model .*/tokenizer\.json is no file: give"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as a tokenizer \(.*\): give"):
        HuggingFaceTokenizer(tmp_path)


def test_an_id_outside_the_vocabulary_is_refused(file: Path) -> None:
    for token in (-1, 300):
        with pytest.raises(DataError, match=f"token id {token} is not in the vocabulary of 300"):
            HuggingFaceTokenizer(file).decode([5, token])
