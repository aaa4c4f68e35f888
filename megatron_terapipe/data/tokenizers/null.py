"""A tokenizer of texts that are token ids already, as data has that another program tokenized."""

from collections.abc import Sequence

from megatron_terapipe.data.tokenizers.token_ids import check_in_vocabulary
from megatron_terapipe.errors import DataError


class NullTokenizer:
    """Ids as decimal numbers with blanks between them, and one more id that ends a document.

    Attributes:
        vocab_size: number of ids, the end of a document included.
        eod: id that ends a document: the highest.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        """Take the number of ids without the end of a document.

        Raises:
            DataError: it is not given.
        """
        if vocab_size is None:
            raise DataError(
                "NullTokenizer has no vocabulary of its own: add --vocab-size, without the end of a document"
            )
        self.eod, self.vocab_size = vocab_size, vocab_size + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids that `text` lists.

        Raises:
            DataError: a word is no id of the vocabulary.
        """
        words, digits = text.split(), len(str(self.eod))
        wrong = next(
            (word for word in words if not word.isdecimal() or len(word.lstrip("0")) > digits or int(word) > self.eod),
            None,
        )
        if wrong is not None:
            raise DataError(
                f"{wrong!r} is no token id below {self.vocab_size}, and NullTokenizer takes nothing else: choose the "
                "--tokenizer-type that reads words, or raise --vocab-size"
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return `ids` as text.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        check_in_vocabulary(ids, self.vocab_size)
        return " ".join(map(str, ids))
