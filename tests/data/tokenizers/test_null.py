"""Texts that are token ids already."""

import pytest

from megatron_terapipe.data.tokenizer import TokenizerSettings, build_tokenizer
from megatron_terapipe.errors import DataError


def test_ids_are_themselves_and_the_end_of_a_document_is_the_one_after_them() -> None:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 3 99\n0 ") == [3, 99, 0]
    assert tokenizer.decode([3, 99, 100]) == "3 99 100"


@pytest.mark.parametrize("text", ["1 two", "101", "-1", "1.5"])
def test_other_words_are_refused(text: str) -> None:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100))
    with pytest.raises(DataError, match="is no token id below 101, and NullTokenizer takes nothing else"):
        tokenizer.encode(text)


def test_the_size_is_asked_for() -> None:
    with pytest.raises(DataError, match="add --vocab-size, without the end of a document"):
        build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer"))
