"""The tokenizer that needs no file."""

from collections.abc import Sequence

from megatron_terapipe.errors import DataError


class ByteTokenizer:
    """A tokenizer with one token per UTF-8 byte, and one more for the end of a document."""

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
