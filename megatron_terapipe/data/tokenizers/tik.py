"""Byte pair encoding of the package `tiktoken`, with a vocabulary in Megatron's JSON file.

The file is a list of objects, by rising rank: `{"rank": 0, "token_bytes": "AA==", "token_str": ...}`. Bytes are in
base64, and the 256 single bytes come first. Ids of special tokens come before all others.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.config.fields.options import one_of
from megatron_terapipe.config.files.data import TIKTOKEN_SPECIAL_TOKENS
from megatron_terapipe.data.tokenizers.token_ids import check_in_vocabulary, without_lone_surrogates
from megatron_terapipe.errors import DataError, not_installed

PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Regular expressions of the words that are encoded one by one, by the names that Megatron gives them."""

DEFAULT_VOCAB_SIZE = 2**17
"""Ids where `--vocab-size` says nothing."""


class TikTokenizer:
    """A byte pair encoding of `tiktoken`. `</s>` ends a document; a text that spells a special token is that text.

    Attributes:
        vocab_size: number of ids, those of special tokens included.
        eod: id that ends a document.
    """

    name = "TikTokenizer"

    def __init__(
        self,
        path: Path,
        *,
        pattern: str | None,
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        """Read the vocabulary.

        Args:
            vocab_size: number of ids, special tokens included; the vocabulary is cut to fit. None for 2**17.
            special_tokens: the first of them; the rest are fillers. None for `TIKTOKEN_SPECIAL_TOKENS`.

        Raises:
            DataError: the package is not installed, the file is missing or malformed, or numbers do not fit.
        """
        try:
            from tiktoken import Encoding
        except ImportError:
            raise DataError(f"TikTokenizer needs {not_installed('tiktoken')}") from None
        if pattern not in PATTERNS:
            raise DataError(f"--tiktoken-pattern {pattern} is not known: choose {one_of(list(PATTERNS))}")
        self.vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
        special = _special_tokens(special_tokens or TIKTOKEN_SPECIAL_TOKENS, num_special_tokens)
        self.eod = special.index(TIKTOKEN_SPECIAL_TOKENS[-1])
        tokens = _read(path)
        wanted = self.vocab_size - num_special_tokens
        if not 0 < wanted <= len(tokens):
            raise DataError(
                f"{path} has {len(tokens)} tokens, and --vocab-size {self.vocab_size} asks for {wanted} and "
                f"{num_special_tokens} special ones: give --vocab-size {len(tokens) + num_special_tokens} or less"
            )
        self._encoding = Encoding(
            path.stem,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(tokens[:wanted])},
            special_tokens={token: number for number, token in enumerate(special)},
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a lone surrogate, which has no UTF-8, becomes `?`."""
        return self._encoding.encode_ordinary(without_lone_surrogates(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens spelled out, bytes that are no UTF-8 replaced.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        check_in_vocabulary(ids, self.vocab_size)
        return self._encoding.decode(list(ids))


def _special_tokens(named: Sequence[str], count: int) -> list[str]:
    """Return all special tokens, in the order of their ids."""
    missing = [token for token in TIKTOKEN_SPECIAL_TOKENS if token not in named]
    if missing or len(set(named)) < len(named) or len(named) > count:
        raise DataError(
            f"--tiktoken-special-tokens {' '.join(named)} with --tiktoken-num-special-tokens {count}: name at most "
            f"{count}, each once, {', '.join(TIKTOKEN_SPECIAL_TOKENS)} among them"
        )
    return [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]


def _read(path: Path) -> list[bytes]:
    """Return the tokens of a file, by rank."""
    document: Any = read_json(str(path), "--tokenizer-model")
    try:
        tokens = [_token(entry, rank) for rank, entry in enumerate(document)]
    except (ValueError, TypeError, KeyError, IndexError):
        tokens = []
    if tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens):
        raise DataError(
            f"{path} is not a vocabulary of TikTokenizer: give a JSON list of objects with rank and token_bytes, by "
            "rising rank, each token once, the 256 single bytes first"
        )
    return tokens


def _token(entry: Any, rank: int) -> bytes:
    if entry["rank"] != rank:
        raise ValueError(entry)
    return b64decode(entry["token_bytes"], validate=True)
