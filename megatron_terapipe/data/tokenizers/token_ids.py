"""Checks of token ids for tokenizers of other packages."""

from collections.abc import Iterable

from megatron_terapipe.errors import DataError


def without_lone_surrogates(text: str) -> str:
    """Return text that has UTF-8: a lone surrogate, which has none, becomes `?`."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def check_in_vocabulary(ids: Iterable[int], vocab_size: int) -> None:
    """Check that every id is below the size of the vocabulary.

    An id that is in range but has no text is no error.

    Raises:
        DataError: if one is not.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token id {token} is not in the vocabulary of {vocab_size} tokens: "
                "decode with the tokenizer that encoded the text"
            )
