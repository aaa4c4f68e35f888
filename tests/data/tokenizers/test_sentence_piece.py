"""SentencePiece: ids of the package itself, and what is refused."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.data.subword_tokenizers import SentencePieceTokenizer
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_sentence_piece

TEXT = "Hello world, hello caf\u00e9 \u4f60\u597d! unseen W\u00f6rter"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentence_piece(tmp_path_factory.mktemp("trained"))


def test_ids_are_those_of_the_package_without_begin_or_end(file: Path) -> None:
    package = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(file))
    tokenizer = SentencePieceTokenizer(file)
    ids = package.encode(TEXT, add_bos=True, add_eos=True)
    assert [1, *tokenizer.encode(TEXT), tokenizer.eod] == ids
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (330, 2, "SentencePieceTokenizer")


@given(text=st.text(st.characters(exclude_characters="\0\u2581", exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(file: Path, text: str) -> None:
    tokenizer = SentencePieceTokenizer(file)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_lone_surrogate_becomes_a_question_mark_and_an_end_in_text_is_text(file: Path) -> None:
    tokenizer = SentencePieceTokenizer(file)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    assert tokenizer.eod not in tokenizer.encode("a</s>b")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(DataError, match=r"--tokenizer-model .*absent is no file: give the tokenizer\.model"):
        SentencePieceTokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read as a SentencePiece model: give .* HuggingFaceTokenizer"):
        SentencePieceTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="has no end of sentence, which is to end documents"):
        SentencePieceTokenizer(train_sentence_piece(tmp_path, eos_id=-1))


def test_an_id_outside_the_vocabulary_is_refused(file: Path) -> None:
    for token in (-1, 330):
        with pytest.raises(DataError, match=f"token id {token} is not in the vocabulary of 330"):
            SentencePieceTokenizer(file).decode([5, token])


def test_without_the_package_the_error_says_how_to_install_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        DataError, match=r"needs the package sentencepiece, .*: pip install sentencepiece \(extra: data\)$"
    ):
        SentencePieceTokenizer(file)
