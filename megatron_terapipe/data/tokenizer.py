"""The tokenizers by name, and the size the vocabulary has inside the model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megatron_terapipe.data.byte_pair_encoding import GPT2BPETokenizer
from megatron_terapipe.errors import DataError


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def name(self) -> str:
        """What `--tokenizer-type` calls it."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end of document."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`.

        Bytes that are no UTF-8 become the replacement character.

        Raises:
            DataError: an id is outside the vocabulary.
        """


class ByteTokenizer:
    """One token per UTF-8 byte, and one more for the end of a document; needs no file."""

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


def _byte(vocab_file: Path | None, merge_file: Path | None) -> Tokenizer:
    if vocab_file or merge_file:
        raise DataError(
            f"the byte tokenizer reads no file but got {vocab_file or merge_file}: drop "
            "--vocab-file and --merge-file, or choose --tokenizer-type GPT2BPETokenizer"
        )
    return ByteTokenizer()


def _gpt2_bpe(vocab_file: Path | None, merge_file: Path | None) -> Tokenizer:
    if vocab_file is None or merge_file is None:
        missing = "--vocab-file" if vocab_file is None else "--merge-file"
        raise DataError(
            f"GPT2BPETokenizer needs {missing}: give --vocab-file encoder.json and "
            "--merge-file vocab.bpe, or choose --tokenizer-type byte, which needs no file"
        )
    return GPT2BPETokenizer(vocab_file, merge_file)


TOKENIZERS: dict[str, Callable[[Path | None, Path | None], Tokenizer]] = {
    ByteTokenizer.name: _byte,
    GPT2BPETokenizer.name: _gpt2_bpe,
}
"""Every tokenizer by its `--tokenizer-type`: a function of the vocabulary and the merge file."""


def build_tokenizer(tokenizer_type: str, vocab_file: Path | None = None, merge_file: Path | None = None) -> Tokenizer:
    """Build the tokenizer of that name.

    Args:
        tokenizer_type: a key of `TOKENIZERS`.
        vocab_file: the vocabulary, token to id, as JSON; only for byte pair encodings.
        merge_file: the merge rules, one a line, best first; only for byte pair encodings.

    Raises:
        DataError: the name is unknown, or the files are missing, malformed or superfluous.
    """
    if tokenizer_type not in TOKENIZERS:
        raise DataError(f"unknown tokenizer type {tokenizer_type!r}: choose one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[tokenizer_type](vocab_file, merge_file)
