"""Tokenizers of the package `tokenizers`, and those that Hugging Face writes into a `tokenizer.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.data.tokenizers.token_ids import check_in_vocabulary, without_lone_surrogates
from megatron_terapipe.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
ENDS_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that end a document where no `tokenizer_config.json` names one, the first of them that there is."""


class PackageTokenizer:
    """Text to ids and back by a tokenizer of the package `tokenizers`.

    Attributes:
        vocab_size: number of ids, gaps between them included: the model needs a row for the highest.
    """

    eod: int
    """Id that ends a document."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take the package's tokenizer, set up to add nothing to a text and to cut nothing off."""
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a lone surrogate, which has no UTF-8, becomes `?`.

        Raises:
            DataError: the tokenizer contradicts itself, as one whose token for unknown words is not in its vocabulary.
        """
        # The fast form leaves out which characters each token came from: a quarter less time.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([without_lone_surrogates(text)], add_special_tokens=False)
        except BaseException as error:
            if not _is_of_package(error):
                raise
            raise _contradiction(error) from None
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens spelled out, bytes that are no UTF-8 replaced.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        check_in_vocabulary(ids, self.vocab_size)
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        except BaseException as error:
            if not _is_of_package(error):
                raise
            raise _contradiction(error) from None
        return text


class HuggingFaceTokenizer(PackageTokenizer):
    """Any tokenizer that the package `tokenizers` reads, without what it adds around a text.

    Text that spells a special token, as `<|endoftext|>`, is encoded as that text; only `eod` ends a document.
    Truncation and padding that the file may ask for are switched off: a document keeps all its tokens.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        """Read the tokenizer.

        Args:
            path: `tokenizer.json`, or the directory that holds it. A `tokenizer_config.json` beside it says which
                token ends a document.

        Raises:
            DataError: the file is missing or malformed, or no token ends a document.
        """
        file = path / TOKENIZER_FILE if path.is_dir() else path
        tokenizer = _read(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        super().__init__(tokenizer)
        self.eod = self._find_end(file)

    def _find_end(self, file: Path) -> int:
        named = _end_named_by(file.with_name(CONFIG_FILE))
        for token in (named,) if named else ENDS_OF_DOCUMENT:
            token_id: int | None = self._tokenizer.token_to_id(token)
            if token_id is not None:
                return token_id
        looked_for = f"{named}, which {CONFIG_FILE} names" if named else ", ".join(ENDS_OF_DOCUMENT)
        raise DataError(
            f"{file} has no token that ends a document (looked for {looked_for}): name one of its tokens as eos_token "
            f"in {file.with_name(CONFIG_FILE)}"
        )


def _read(file: Path) -> Tokenizer:
    if not file.is_file():
        raise DataError(
            f"--tokenizer-model {file} is no file: give a {TOKENIZER_FILE} on this machine, or the directory of one"
        )
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:
        if not _is_of_package(error):
            raise
        raise DataError(
            f"{file} cannot be read as a tokenizer ({_one_line(error)}): give the {TOKENIZER_FILE} of Hugging Face"
        ) from None


def _is_of_package(error: BaseException) -> bool:
    """Return whether an error is the package's word on its files.

    It raises plain exceptions, and where its own code goes wrong a `PanicException`, which is no `Exception`.
    """
    return type(error).__name__ == "PanicException" or (
        isinstance(error, Exception) and not isinstance(error, MemoryError)
    )


def _contradiction(error: BaseException) -> DataError:
    return DataError(
        f"the tokenizer contradicts itself ({_one_line(error)}): give the {TOKENIZER_FILE} of Hugging Face, or the "
        "vocabulary and the merges of one encoding"
    )


def _end_named_by(config_file: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`; None if there is no such file or no such entry."""
    if not config_file.is_file():
        return None
    settings: Any = read_json(str(config_file), "--tokenizer-model", unbounded=True)
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    # Older files spell it as an object with the text and how it is stripped.
    named = token.get("content") if isinstance(token, dict) else token
    return named if isinstance(named, str) else None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
