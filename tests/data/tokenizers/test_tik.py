"""Megatron's vocabularies for `tiktoken`, small ones written here."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.data.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron_terapipe.errors import DataError

MERGES = [b"lo", b"low", b" low", b"12", b"wL"]
SIZES = {"tiktoken_num_special_tokens": 5, "vocab_size": 5 + 256 + len(MERGES)}


def write(folder: Path, tokens: list[bytes]) -> Path:
    path = folder / "tokens.json"
    entries = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": repr(token)}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return path


def build(path: Path, **settings: Any) -> Tokenizer:
    given = {"tiktoken_pattern": "v2", **SIZES, **settings}
    return build_tokenizer(TokenizerSettings(tokenizer_type="TikTokenizer", tokenizer_model=str(path), **given))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tik"), [*(bytes([byte]) for byte in range(256)), *MERGES])


def test_special_tokens_come_first(path: Path) -> None:
    tokenizer = build(path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (266, 2)
    assert tokenizer.encode("low low") == [5 + 257, 5 + 258]
    assert tokenizer.encode("</s>") == [5 + byte for byte in b"</s>"], "a text is no end of a document"
    assert tokenizer.decode([2, 4, 5 + 257]) == "</s><SPECIAL_4>low"
    custom = build(path, tiktoken_special_tokens=("<s>", "</s>", "<x>", "<unk>"))
    assert (custom.eod, custom.decode([2, 4])) == (1, "<x><SPECIAL_4>")


def test_patterns_split_words(path: Path) -> None:
    """Both take each digit alone; the second also ends a word before a capital."""
    twelve = [5 + byte for byte in b"12"]
    assert build(path).encode("12") == build(path, tiktoken_pattern="v1").encode("12") == twelve
    assert build(path).encode("wL") == [5 + byte for byte in b"wL"]
    assert build(path, tiktoken_pattern="v1").encode("wL") == [5 + 260]


def test_a_vocabulary_is_cut_to_the_size(path: Path) -> None:
    tokenizer = build(path, vocab_size=5 + 256 + 1)
    assert tokenizer.encode("low") == [5 + 256, 5 + ord("w")]
    assert tokenizer.vocab_size == 262


@given(text=st.text())
def test_texts_round_trip(path: Path, text: str) -> None:
    tokenizer = build(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod not in tokenizer.encode(text)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tiktoken_pattern": None}, "--tiktoken-pattern None is not known: choose v1 or v2"),
        ({"vocab_size": None}, "has 261 tokens, and --vocab-size 131072 asks for 131067"),
        ({"vocab_size": 5}, "asks for 0 and 5 special ones: give --vocab-size 266 or less"),
        ({"tiktoken_num_special_tokens": 2}, "name at most 2, each once"),
        ({"tiktoken_special_tokens": ("<s>", "</s>")}, "<unk>, <s>, </s> among them"),
        ({"tiktoken_special_tokens": ("<s>", "</s>", "<unk>", "<s>")}, "each once"),
    ],
)
def test_settings_that_do_not_fit_are_named(path: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(DataError, match=line):
        build(path, **settings)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '[{"rank": 1, "token_bytes": "AA=="}]', '[{"rank": 0, "token_bytes": "!"}]', "[1]"],
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tokens.json is not a vocabulary of TikTokenizer"):
        build(path)


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(UserError, match=r"--tokenizer-model .*tokens.json is not JSON"):
        build(tmp_path / "tokens.json")
