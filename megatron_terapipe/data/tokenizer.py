"""The protocol of a tokenizer, and the tokenizer that a configuration names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from megatron_terapipe.config.data import TOKENIZER_FILES, DataConfig
from megatron_terapipe.config.options import flag, one_of
from megatron_terapipe.data.byte_pair_encoding import GPT2BPETokenizer
from megatron_terapipe.data.hugging_face_tokenizer import HuggingFaceTokenizer
from megatron_terapipe.data.sentence_piece_tokenizer import SentencePieceTokenizer
from megatron_terapipe.errors import DataError


class ByteTokenizer:
    """One token per UTF-8 byte, and one more for the end of a document."""

    name = "byte"
    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`; a lone surrogate, which has no UTF-8, becomes `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; the end of a document has none.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token} is outside the byte tokenizer's [0, {self.vocab_size}): "
                    "decode with the tokenizer that encoded the text"
                )
        text = bytes(token for token in ids if token != self.eod)
        return text.decode("utf-8", errors="replace")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str:
        """Name of the tokenizer, as in `--tokenizer-type`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` alone: no begin of text is added, and no end of document."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`.

        Bytes that are no UTF-8 become the replacement character.

        Raises:
            DataError: an id is outside the vocabulary.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Type and files of a tokenizer, as a checkpoint keeps them."""

    tokenizer_type: str = "byte"
    """A key of `TOKENIZER_FILES`."""

    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer."""

    merge_file: str | None = None
    """Merge rules of GPT2BPETokenizer."""

    tokenizer_model: str | None = None
    """File of SentencePieceTokenizer; file of HuggingFaceTokenizer, or the directory that holds it."""

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        """Return the settings that the data section holds."""
        return cls(
            tokenizer_type=data.tokenizer_type,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            tokenizer_model=data.tokenizer_model,
        )


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    tokenizer.name: tokenizer
    for tokenizer in (ByteTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer)
}
"""Every tokenizer by its name: a function of the paths of its files, in the order of `TOKENIZER_FILES`."""


def build_tokenizer(settings: TokenizerSettings | DataConfig) -> Tokenizer:
    """Build the tokenizer that the settings name.

    Raises:
        DataError: the name is unknown, a file is missing, malformed or superfluous, or a package is not installed.
    """
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
    return TOKENIZERS[name](*(Path(getattr(settings, field)) for field in needed))
