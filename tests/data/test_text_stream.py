"""Text token by token: joined it is the whole, and no piece shows half a character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.data.subword_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from megatron_terapipe.data.tokenizer import ByteTokenizer, TextStream, Tokenizer
from tests.data.trained_tokenizers import train_hugging_face, train_sentence_piece

TEXT = "Hello world, caf\u00e9 \u4f60\u597d lower. Unseen words: W\u00f6rter, \u00e0 la carte"


@pytest.fixture(scope="module", params=["byte", "hugging_face", "sentence_piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("trained")
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "hugging_face":
        return HuggingFaceTokenizer(train_hugging_face(folder))
    return SentencePieceTokenizer(train_sentence_piece(folder))


def pieces_of(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*map(stream.push, tokens), stream.rest()]


@pytest.mark.parametrize("size", [1, 3, 6])
def test_pieces_are_the_text_after_the_prompt_spaces_and_all(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(TEXT)
    before, tokens = ids[:size], ids[size:]
    pieces = pieces_of(tokenizer, before, tokens)
    assert tokenizer.decode(before) + "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 3


@given(text=st.text(st.characters(exclude_characters="\0\u2581\ufffd", exclude_categories=["Cs"]), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_whole(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("Hello")
    tokens = tokenizer.encode(text)
    whole = tokenizer.decode([*before, *tokens])
    assert tokenizer.decode(before) + "".join(pieces_of(tokenizer, before, tokens)) == whole


def test_what_never_becomes_a_character_comes_at_the_end() -> None:
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD]) == ["", "", "\ufffd"]
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD, 0xA0]) == ["", "", "\u4f60", ""]
