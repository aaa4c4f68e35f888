"""SentencePiece tokenizers, as Llama 1 and 2 have."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_terapipe.data.tokenizers.token_ids import check_in_vocabulary, without_lone_surrogates
from megatron_terapipe.errors import DataError, not_installed

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class SentencePieceTokenizer:
    """A model of the package `sentencepiece`; its end of sentence ends a document.

    Nothing is put before a text: a model that was trained with a begin of text has it in its data.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, path: Path) -> None:
        """Read the model.

        Raises:
            DataError: the package is not installed, the file is missing or malformed, or has no end of sentence.
        """
        self._model = _read(path)
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise DataError(
                f"{path} has no end of sentence, which is to end documents: train the SentencePiece model with one"
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a lone surrogate, which has no UTF-8, becomes `?`."""
        ids: list[int] = self._model.encode(without_lone_surrogates(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; the end of a document has none.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        check_in_vocabulary(ids, self.vocab_size)
        text: str = self._model.decode(list(ids))
        return text


def _read(path: Path) -> "SentencePieceProcessor":
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise DataError(f"SentencePieceTokenizer needs {not_installed('sentencepiece')}") from None
    if not path.is_file():
        raise DataError(f"--tokenizer-model {path} is no file: give the tokenizer.model of SentencePiece")
    try:
        return SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError):  # The last where a message of the package is no UTF-8.
        raise DataError(
            f"{path} cannot be read as a SentencePiece model: give its tokenizer.model, or choose --tokenizer-type "
            "HuggingFaceTokenizer for a tokenizer.json"
        ) from None
