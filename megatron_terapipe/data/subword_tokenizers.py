"""Subword tokenizers, by the package that reads their files.

    HuggingFaceTokenizer      tokenizers      tokenizer.json
    GPT2BPETokenizer          tokenizers      GPT-2's two files, vocabulary and merges
    TikTokenizer              tiktoken        Megatron's JSON file
    SentencePieceTokenizer    sentencepiece   tokenizer.model

TikTokenizer: the file is a list of objects, by rising rank: `{"rank": 0, "token_bytes": "AA==", "token_str": ...}`.
Bytes are in base64, and the 256 single bytes come first. Ids of special tokens come before all others.
"""

from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as TokenizerOfPackage
from tokenizers import decoders, models, pre_tokenizers

from deepspeed_ext.plan.text_files import bounded_bytes, read_text
from megatron_terapipe.config.data import TIKTOKEN_SPECIAL_TOKENS
from megatron_terapipe.config.options import one_of
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import DataError, not_installed

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class Tokenizer(ABC):
    """Text to token ids and back."""

    name: str
    """Name of the tokenizer, as in `--tokenizer-type`."""
    vocab_size: int
    """Number of ids, gaps between them included: every id is in [0, vocab_size)."""
    eod: int
    """Id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without a begin of text or an end of document.

        A lone surrogate, which has no UTF-8, becomes `?`.
        """
        return self._encode(text.encode("utf-8", errors="replace").decode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; refuse ids outside the vocabulary, though not ids in it that have no text.

        Bytes that are not UTF-8 become the replacement character.
        """
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise DataError(
                    f"token id {token} is not in the vocabulary of {self.vocab_size} tokens: "
                    "decode with the tokenizer that encoded the text"
                )
        return self._decode(list(ids))

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Return the ids of `text`, which has UTF-8."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, each below the size of the vocabulary."""


TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
ENDS_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that end a document where no `tokenizer_config.json` names one, the first of them that there is."""


class PackageTokenizer(Tokenizer):
    """A tokenizer of the package `tokenizers`, which neither adds tokens to a text nor truncates it.

    Special tokens are spelled out in texts, and bytes that are not UTF-8 replaced.
    """

    def __init__(self, tokenizer: TokenizerOfPackage) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            raise DataError("the tokenizer has no tokens: give the files of a whole one")
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _encode(self, text: str) -> list[int]:
        with _errors_of_package("the tokenizer contradicts itself"):
            # The fast form leaves out which characters each token came from: a quarter less time.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _decode(self, ids: list[int]) -> str:
        with _errors_of_package("the tokenizer contradicts itself"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its spelling; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def plain_text(self, ids: list[int]) -> str:
        """Return the text of ids without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@contextmanager
def _errors_of_package(problem: str) -> Iterator[None]:
    """Raise errors of the package as `DataError`s: exceptions, or a `PanicException`, not an `Exception`."""
    try:
        yield
    except BaseException as error:
        is_plain = isinstance(error, Exception) and not isinstance(error, MemoryError)
        if not is_plain and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{problem} ({' '.join(str(error).split())}): give the {TOKENIZER_FILE} of Hugging Face, or the vocabulary "
            "and the merges of one encoding"
        ) from None


class HuggingFaceTokenizer(PackageTokenizer):
    """Any tokenizer that the package `tokenizers` reads, without the tokens that it adds around a text.

    Text that spells a special token, as `<|endoftext|>`, is encoded as that text; only `eod` ends a document.
    Truncation and padding of the file are switched off: a document keeps all its tokens.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        """Read `tokenizer.json`, or the one in a directory.

        A `tokenizer_config.json` in its folder may name the token that ends a document.
        """
        file = path / TOKENIZER_FILE if path.is_dir() else path
        tokenizer = _read_tokenizer_json(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        super().__init__(tokenizer)
        self.eod = self._find_end(file)

    def _find_end(self, file: Path) -> int:
        named = _end_named_by(file.with_name(CONFIG_FILE))
        for token in (named,) if named else ENDS_OF_DOCUMENT:
            if (token_id := self.id_of(token)) is not None:
                return token_id
        candidates = f"{named}, which {CONFIG_FILE} names" if named else ", ".join(ENDS_OF_DOCUMENT)
        raise DataError(
            f"{file} has no token that ends a document (looked for {candidates}): name one of its tokens as eos_token "
            f"in {file.with_name(CONFIG_FILE)}"
        )


def _read_tokenizer_json(file: Path) -> TokenizerOfPackage:
    if not file.is_file():
        raise DataError(
            f"--tokenizer-model {file} is not a file: give a {TOKENIZER_FILE} on this machine, or the directory of one"
        )
    text = read_text(file, "--tokenizer-model")
    with _errors_of_package(f"{file} cannot be read as a tokenizer"):
        return TokenizerOfPackage.from_str(text)


def _end_named_by(config_file: Path) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`; None if there is no such file or no such entry."""
    if not config_file.is_file():
        return None
    settings: Any = read_json(str(config_file), "--tokenizer-model", unbounded=True)
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    # Older files spell it as an object with the text and how it is stripped.
    named = token.get("content") if isinstance(token, dict) else token
    return named if isinstance(named, str) else None


END_OF_DOCUMENT = "<|endoftext|>"


class GPT2BPETokenizer(PackageTokenizer):
    """Byte pair encoding over GPT-2's words, from its `encoder.json` and `vocab.bpe`.

    Text that spells `<|endoftext|>` is encoded as that text; only `eod` ends a document.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path) -> None:
        """Read the two files.

        Args:
            vocab_file: JSON object from token, in GPT-2's printable spelling, to id.
            merge_file: one rule `left right` a line, best first, after an optional `#version` line.
        """
        vocabulary = _read_vocabulary(vocab_file)
        merges = _read_merges(merge_file, vocabulary)
        tokenizer = TokenizerOfPackage(models.BPE(vocabulary, merges))
        # Both spell bytes in the printable alphabet.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)
        self.eod = vocabulary[END_OF_DOCUMENT]


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(str(path), "--vocab-file")
    if not isinstance(vocabulary, dict) or not all(
        type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in vocabulary.values()
    ):
        raise DataError(
            f"the vocabulary {path} is not a JSON object from token to id: "
            "--vocab-file takes encoder.json or vocab.json"
        )
    for token in (END_OF_DOCUMENT, *sorted(pre_tokenizers.ByteLevel.alphabet())):
        if token not in vocabulary:
            raise DataError(
                f"the vocabulary {path} has no token {token!r}, which a byte-level encoding needs: "
                "give a vocabulary of GPT-2's kind"
            )
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    rules: dict[tuple[str, str], None] = {}  # of a rule that appears twice, the first counts
    for number, line in enumerate(read_text(path, "--merge-file").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        symbols = line.split()
        if len(symbols) != 2:
            raise DataError(
                f"{path}:{number}: a merge rule is two tokens, not {line!r}: --merge-file takes vocab.bpe or merges.txt"
            )
        left, right = symbols
        if not {left, right, left + right} <= vocabulary.keys():
            raise DataError(
                f"{path}:{number}: the vocabulary has not all tokens of the merge rule {line!r}: "
                "give the vocabulary and the merge rules of one encoding"
            )
        rules.setdefault((left, right))
    return list(rules)


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
"""Number of ids without `--vocab-size`."""


class TikTokenizer(Tokenizer):
    """A byte pair encoding of `tiktoken`. `</s>` ends a document; a text that spells a special token is that text."""

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
        """
        try:
            from tiktoken import Encoding
        except ImportError:
            raise DataError(f"TikTokenizer needs {not_installed('tiktoken')}") from None
        if pattern not in PATTERNS:
            wrong = f"{pattern} is not known" if pattern else "is needed for TikTokenizer"
            raise DataError(f"--tiktoken-pattern {wrong}: choose {one_of(list(PATTERNS))}")
        self.vocab_size = vocab_size or DEFAULT_VOCAB_SIZE
        special = _special_tokens(special_tokens or TIKTOKEN_SPECIAL_TOKENS, num_special_tokens)
        self.eod = special.index(TIKTOKEN_SPECIAL_TOKENS[-1])
        tokens = _read_tiktoken_vocabulary(path)
        needed = self.vocab_size - num_special_tokens
        if not 0 < needed <= len(tokens):
            raise DataError(
                f"{path} has {len(tokens)} tokens, and --vocab-size {self.vocab_size} needs {needed} and "
                f"{num_special_tokens} special ones: give --vocab-size {len(tokens) + num_special_tokens} or less"
            )
        self._encoding = Encoding(
            path.stem,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(tokens[:needed])},
            special_tokens={token: number for number, token in enumerate(special)},
        )

    def _encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _special_tokens(named: Sequence[str], count: int) -> list[str]:
    """Return all special tokens, in the order of their ids."""
    missing = [token for token in TIKTOKEN_SPECIAL_TOKENS if token not in named]
    if missing or len(set(named)) < len(named) or len(named) > count:
        raise DataError(
            f"--tiktoken-special-tokens {' '.join(named)} with --tiktoken-num-special-tokens {count}: name at most "
            f"{count}, each once, {', '.join(TIKTOKEN_SPECIAL_TOKENS)} among them"
        )
    return [*named, *(f"<SPECIAL_{number}>" for number in range(len(named), count))]


def _read_tiktoken_vocabulary(path: Path) -> list[bytes]:
    """Return the tokens of a file, by rank."""
    document: Any = read_json(str(path), "--tokenizer-model")
    try:
        tokens = [_tiktoken_token(entry, rank) for rank, entry in enumerate(document)]
    except (ValueError, TypeError, KeyError, IndexError):
        tokens = []
    if tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens):
        raise DataError(
            f"{path} is not a vocabulary of TikTokenizer: give a JSON list of objects with rank and token_bytes, by "
            "rising rank, each token once, the 256 single bytes first"
        )
    return tokens


def _tiktoken_token(entry: Any, rank: int) -> bytes:
    if entry["rank"] != rank:
        raise ValueError(entry)
    return b64decode(entry["token_bytes"], validate=True)


class SentencePieceTokenizer(Tokenizer):
    """A model of the package `sentencepiece`; its end of sentence ends a document.

    No begin of text is added: the data of a model that was trained with one must contain it.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, path: Path) -> None:
        self._model = _read_sentencepiece_model(path)
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int = self._model.eos_id()
        if self.eod < 0:
            raise DataError(
                f"{path} has no end of sentence, which is to end documents: train the SentencePiece model with one"
            )

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)


def _read_sentencepiece_model(path: Path) -> "SentencePieceProcessor":
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise DataError(f"SentencePieceTokenizer needs {not_installed('sentencepiece')}") from None
    if not path.is_file():
        raise DataError(f"--tokenizer-model {path} is not a file: give the tokenizer.model of SentencePiece")
    try:
        model = SentencePieceProcessor()
        model.LoadFromSerializedProto(bounded_bytes(path))
        return model
    except (RuntimeError, OSError, ValueError):  # The last where a message of the package is no UTF-8.
        raise DataError(
            f"{path} cannot be read as a SentencePiece model: give its tokenizer.model, or choose --tokenizer-type "
            "HuggingFaceTokenizer for a tokenizer.json"
        ) from None
