"""GPT-2's byte pair encoding, from the two files that it was published in.

The package `tokenizers` merges the bytes of a word. Words are split and remembered here: text repeats its words, and so
encoding takes a third of the time that the package takes for whole texts.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.data.tokenizers.hugging_face import PackageTokenizer
from megatron_terapipe.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"

WORD_PATTERN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""Splits text into the words within which bytes are merged (the ids of GPT-2's own pattern)."""


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

        Raises:
            UserError: a file is missing or malformed, or they are not of the same encoding.
        """
        vocabulary = _read_vocabulary(vocab_file)
        merges = _read_merges(merge_file, vocabulary)
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, cache_capacity=0))
        # Both spell bytes in the printable alphabet.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        super().__init__(tokenizer)
        self.eod = vocabulary[END_OF_DOCUMENT]
        self._words = _WordCache(super().encode)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a lone surrogate, which has no UTF-8, becomes `?`."""
        # map over a dictionary keeps the loop over words, the hot one, out of the interpreter.
        return list(chain.from_iterable(map(self._words.__getitem__, WORD_PATTERN.findall(text))))


class _WordCache(dict[str, list[int]]):
    """Ids by word."""

    max_words = 1 << 20  # about 300 MB when full; more words than that rarely come again

    def __init__(self, encode_word: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode_word(word)
        if len(self) < self.max_words:
            self[word] = ids
        return ids


def _printable_bytes() -> list[str]:
    """Return GPT-2's spelling of each byte: itself if printable, else the next code from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(str(path), "--vocab-file")
    if not isinstance(vocabulary, dict) or not all(
        type(token_id) is int and 0 <= token_id < 1 << 32 for token_id in vocabulary.values()
    ):
        raise DataError(
            f"the vocabulary {path} is not a JSON object from token to id: "
            "--vocab-file takes encoder.json or vocab.json"
        )
    for token in (END_OF_DOCUMENT, *_printable_bytes()):
        if token not in vocabulary:
            raise DataError(
                f"the vocabulary {path} has no token {token!r}, which a byte-level encoding needs: "
                "give a vocabulary of GPT-2's kind"
            )
    return vocabulary


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    rules: dict[tuple[str, str], None] = {}  # of a rule that stands twice, the first counts
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
                f"{path}:{number}: the vocabulary lacks a token of the merge rule {line!r}: "
                "give the vocabulary and the merge rules of one encoding"
            )
        rules.setdefault((left, right))
    return list(rules)
