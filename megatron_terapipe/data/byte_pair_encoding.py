"""GPT-2's byte pair encoding in Python: the exact ids of the published vocabulary."""

import heapq
import json
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path

import regex

from megatron_terapipe.errors import DataError

WORD_PATTERN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""Cuts text into the words within which bytes are merged (the ids of GPT-2's own pattern)."""

END_OF_DOCUMENT = "<|endoftext|>"

MergeRules = dict[tuple[int, int], tuple[int, int]]
"""(left id, right id) -> (rank, merged id); the lowest rank is merged first."""

_NO_TOKEN = -1


class GPT2BPETokenizer:
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
            DataError: a file is missing or malformed, or they are not of the same encoding.
        """
        vocabulary = _read_vocabulary(vocab_file)
        alphabet = _printable_bytes()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary[END_OF_DOCUMENT]
        byte_ids = [vocabulary[symbol] for symbol in alphabet]
        rules = _read_merges(merge_file, vocabulary)
        self._words = _WordCache(
            lambda word: merge([byte_ids[byte] for byte in word.encode("utf-8", errors="replace")], rules)
        )
        byte_of = {symbol: byte for byte, symbol in enumerate(alphabet)}
        self._bytes_of = {
            token_id: bytes(byte_of[symbol] for symbol in token)
            if all(symbol in byte_of for symbol in token)
            # A special token is spelled in plain text, not in the printable alphabet.
            else token.encode("utf-8")
            for token, token_id in vocabulary.items()
        }

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; a lone surrogate, which has no UTF-8, becomes `?`."""
        # map over a dictionary keeps the loop over words, the hot one, out of the interpreter.
        return list(chain.from_iterable(map(self._words.__getitem__, WORD_PATTERN.findall(text))))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, replacing bytes that are no UTF-8.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        try:
            text = b"".join([self._bytes_of[token] for token in ids])
        except KeyError as error:
            raise DataError(
                f"token id {error} is not in the vocabulary of {len(self._bytes_of)} tokens: "
                "decode with the vocabulary that encoded the text"
            ) from None
        return text.decode("utf-8", errors="replace")


def merge(ids: Sequence[int], rules: MergeRules) -> list[int]:
    """Apply the merge rules to one word, best rule first, left to right within a rule.

    A heap of candidate pairs over a linked list, so that a word of n bytes costs O(n log n):
    a megabyte of letters without a space is slow in the usual rescan after every merge.

    Args:
        ids: the ids of the word's bytes.
        rules: what may be merged.

    Returns:
        The ids left when no rule applies.
    """
    # The last entry ends the word on both sides: it is also what index -1 means.
    symbols = [*ids, _NO_TOKEN]
    following = [*range(1, len(symbols)), len(ids)]
    preceding = list(range(-1, len(symbols) - 1))
    candidates = [(rules[pair][0], left) for left, pair in enumerate(pairwise(symbols)) if pair in rules]
    heapq.heapify(candidates)
    while candidates:
        rank, left = heapq.heappop(candidates)
        if symbols[left] == _NO_TOKEN:
            continue
        right = following[left]
        rule = rules.get((symbols[left], symbols[right]))
        # The pair that was pushed may be gone: an earlier merge took one of its halves.
        if rule is None or rule[0] != rank:
            continue
        symbols[left], symbols[right] = rule[1], _NO_TOKEN
        following[left] = following[right]
        preceding[following[right]] = left
        for start in (preceding[left], left):
            neighbour = rules.get((symbols[start], symbols[following[start]]))
            if neighbour is not None:
                heapq.heappush(candidates, (neighbour[0], start))
    return [symbol for symbol in symbols if symbol != _NO_TOKEN]


class _WordCache(dict[str, list[int]]):
    """Ids by word; text repeats its words, so most lookups never merge anything."""

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


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot read the {what} {path} ({error.strerror}): give the path of GPT-2's own file"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"the {what} {path} is not UTF-8 text: give GPT-2's own file") from None


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(_read_text(path, "vocabulary"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"the vocabulary {path} is not JSON (line {error.lineno}: {error.msg}): "
            "--vocab-file takes encoder.json or vocab.json"
        ) from None
    if not isinstance(vocabulary, dict) or not all(
        isinstance(token_id, int) and token_id >= 0 for token_id in vocabulary.values()
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


def _read_merges(path: Path, vocabulary: dict[str, int]) -> MergeRules:
    rules: MergeRules = {}
    for number, line in enumerate(_read_text(path, "merge rules").split("\n"), start=1):
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
        pair = (vocabulary[left], vocabulary[right])
        rules.setdefault(pair, (len(rules), vocabulary[left + right]))
    return rules
