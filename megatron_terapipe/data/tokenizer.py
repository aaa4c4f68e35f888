"""Tokenizers without a package, the tokenizer that settings name, and text of tokens that arrive one by one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_terapipe.config.data import TOKENIZER_FILES
from megatron_terapipe.config.options import flag, one_of
from megatron_terapipe.data.subword_tokenizers import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
)
from megatron_terapipe.data.tokenizer_settings import TokenizerSettings
from megatron_terapipe.errors import DataError


class NullTokenizer(Tokenizer):
    """Ids as decimal numbers with blanks between them, and one more, the highest, that ends a document."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise DataError("NullTokenizer has no vocabulary of its own: add --vocab-size")
        self.eod, self.vocab_size = vocab_size, vocab_size + 1

    def _encode(self, text: str) -> list[int]:
        digits = len(str(self.eod))
        for word in text.split():
            if not word.isdecimal() or len(word.lstrip("0")) > digits or int(word) > self.eod:
                raise DataError(
                    f"{word!r} is not a token id below {self.vocab_size}, and NullTokenizer takes ids only: choose "
                    "the --tokenizer-type that reads words, or raise --vocab-size"
                )
        return [int(word) for word in text.split()]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and one more, without text, for the end of a document."""

    name = "byte"
    vocab_size = 257
    eod = 256

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token != self.eod).decode("utf-8", errors="replace")


TOKENIZERS: dict[str, Callable[[TokenizerSettings], Tokenizer]] = {
    ByteTokenizer.name: lambda _: ByteTokenizer(),
    GPT2BPETokenizer.name: lambda given: GPT2BPETokenizer(Path(given.vocab_file), Path(given.merge_file)),
    HuggingFaceTokenizer.name: lambda given: HuggingFaceTokenizer(Path(given.tokenizer_model)),
    SentencePieceTokenizer.name: lambda given: SentencePieceTokenizer(Path(given.tokenizer_model)),
    TikTokenizer.name: lambda given: TikTokenizer(
        Path(given.tokenizer_model),
        pattern=given.tiktoken_pattern,
        vocab_size=given.vocab_size,
        num_special_tokens=given.tiktoken_num_special_tokens,
        special_tokens=given.tiktoken_special_tokens,
    ),
    NullTokenizer.name: lambda given: NullTokenizer(given.vocab_size),
}
"""Every tokenizer by its name: a function of settings that have the files of `TOKENIZER_FILES`."""


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Build the tokenizer that the settings name."""
    name = settings.tokenizer_type
    if name not in TOKENIZERS:
        raise DataError(f"unknown tokenizer type {name!r}: choose {one_of(list(TOKENIZERS))}")
    needed = TOKENIZER_FILES[name]
    for field in ("vocab_file", "merge_file", "tokenizer_model"):
        path = getattr(settings, field)
        if field in needed and not path:
            raise DataError(f"{name} needs {flag(field)}: add it, or choose --tokenizer-type byte, which needs no file")
        if path and field not in needed:
            raise DataError(
                f"{name} reads no {flag(field)} but got {path}: drop it, or choose the --tokenizer-type that reads it"
            )
    return TOKENIZERS[name](settings)


UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into pieces of text, which joined are the text of all of them.

    Tokens may end within a character, so text that may still change is withheld. A tokenizer may write the first
    token of a text without the space before the word: so each piece is the growth of the text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._written = list(before)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that one more token completes; empty while it completes none."""
        self._pending.append(token)
        return "" if self._growth().endswith(UNDECODED) else self.rest()

    def rest(self) -> str:
        """Return the withheld text, complete or not."""
        text = self._growth()
        if self._pending:
            # Tokens before the last piece do not change the text after it.
            self._written, self._pending = self._pending, []
        return text

    def _growth(self) -> str:
        before = self._tokenizer.decode(self._written)
        return self._tokenizer.decode([*self._written, *self._pending])[len(before) :]
