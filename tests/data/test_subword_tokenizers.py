"""Tokenizers of packages: the ids of the package itself, with no token added, cut or taken for an end."""

import json
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as PackageTokenizer

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.data.subword_tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from megatron_terapipe.data.tokenizer import Tokenizer, build_tokenizer
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import DataError
from tests.data.trained_tokenizers import train_hugging_face, train_sentence_piece

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


@pytest.fixture(scope="module", params=["hugging_face", "sentence_piece", "tik"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    build = {"hugging_face": HuggingFaceTokenizer, "sentence_piece": SentencePieceTokenizer, "tik": build_tik}
    return build[request.param](request.getfixturevalue(request.param))


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
        ({"tiktoken_pattern": None}, "--tiktoken-pattern None"),
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


BUILDERS = {"hugging_face": HuggingFaceTokenizer, "sentence_piece": SentencePieceTokenizer, "tik": build_tik}


@pytest.mark.parametrize(
    ("kind", "text", "line"),
    [
        ("hugging_face", None, r"--tokenizer-model .*file is not a file"),
        ("hugging_face", "{}", r"file cannot be read as a tokenizer \("),
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
