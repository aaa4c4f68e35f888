"""Changes that make a bad input out of a real one."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

NUMBERS = (
    *(b"0", b"-1", b"1", b"2", b"255", b"65536", b"2147483648", b"20000000", b"1000000000", b"9223372036854775807"),
    *(b"9223372036854775808", b"10000000000000", b"1" + b"0" * 24, b"1" + b"0" * 400, b"7" * 4400),
    *(b"0.5", b"-0.0", b"1e-320", b"1e30", b"1e308", b"-1e308", b"1e999", b"NaN", b"Infinity", b"-Infinity", b"nan"),
)
"""Numbers at the edges of types, and beyond sense."""

OTHERS = (
    *(b"", b"null", b"true", b"false", b'""', b"[]", b"{}", b"[[]]", b'{"a": 1}', b'"x"', b'"1"', b"[1, 2]", b".inf"),
    *(
        b"\n",
        b"\r\n",
        b'"a\\nb"',
        b"a\nb",
        b"\x00",
        b"\xff\xfe",
        b"\xc3\x28",
        b'"\\ud800"',
        b"\xed\xa0\x80",
        b"\x1b[2J",
    ),
    *("\u2028".encode(), "é".encode(), "\uff11\uff12".encode(), b"\xef\xbb\xbf", b"2024-13-45", b"2024-01-01", b"1:30"),
    *(b"[" * 3000, b'{"a":' * 3000, b"- " * 2000, b"a" * 5000, b"../../x", b"/", b".", b"/dev/null", b"$(touch x)"),
    *(
        b"&a [*a, *a]",
        b"!!python/object/apply:os.system [id]",
        b"-oProxyCommand=id",
        b",",
        b":",
        b"=",
        b" ",
        b"--",
        b"#",
    ),
)
"""Other words that parsers trip over."""

WORDS = (*NUMBERS, *OTHERS)

KINDS = (
    "insert",
    "replace",
    "replace",
    "delete",
    "repeat",
    "flip",
    "cut off",
    "value",
    "value",
    "value",
    "key",
    "splice",
)
"""Kinds of edits, the useful ones more often."""

_TOKEN = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[A-Za-z_][\w.-]*|\"[^\"\n]*\"")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change."""

    kind: str
    place: float
    """Where, as a share of the input."""
    extent: float
    """Length of the change, as a share of the rest."""
    word: bytes

    @classmethod
    def random(cls, random: Random, words: Sequence[bytes]) -> "Edit":
        """Return any edit."""
        return cls(random.choice(KINDS), random.random(), random.random() ** 3, random.choice(words))

    def apply(self, data: bytes) -> bytes:
        """Return the changed input."""
        if self.kind in ("value", "key"):
            return self._in_document(data)
        start = int(self.place * (len(data) + 1))
        end = min(len(data), start + 1 + int(self.extent * 64))
        if self.kind == "insert":
            return data[:start] + self.word + data[start:]
        if self.kind == "replace":
            token = _TOKEN.search(data, start) or _TOKEN.search(data)
            return data if token is None else data[: token.start()] + self.word + data[token.end() :]
        if self.kind == "delete":
            return data[:start] + data[end:]
        if self.kind == "repeat":
            return data[:start] + data[start:end] * (2 + int(self.extent * 1000)) + data[end:]
        if self.kind == "flip":
            flipped = bytearray(data or b"\x00")
            flipped[min(start, len(flipped) - 1)] ^= 1 << int(self.extent * 8) % 8
            return bytes(flipped)
        if self.kind == "splice":
            lines = data.splitlines(keepends=True) or [b""]
            line = lines[int(self.place * len(lines))]
            other = int(self.extent * len(lines))
            return b"".join([*lines[:other], line, *lines[other:]])
        return data[:start]

    def _in_document(self, data: bytes) -> bytes:
        """Change a value or a key of a JSON document, which stays one; another text as `replace` does."""
        try:
            document = json.loads(data)
            value = json.loads(self.word) if self.word else None
        except (ValueError, RecursionError):
            return Edit("replace", self.place, self.extent, self.word).apply(data)
        places = list(_places(document))
        if not places:
            return self.word
        container, key = places[int(self.place * len(places))]
        if self.kind == "key" and isinstance(container, dict):
            moved = container.pop(key)
            if self.extent < 0.5:
                container[f"{key}x" if self.extent < 0.25 else "a\nb"] = moved
        else:
            container[key] = value
        # Python writes NaN and Infinity, which its parser also reads.
        return json.dumps(document).encode()


def mutated(seed: bytes, edits: Sequence[Edit], longest: int = 1 << 16) -> bytes:
    """Return a seed after some edits.

    Args:
        longest: bytes of the result at most.
    """
    for edit in edits:
        seed = edit.apply(seed)[:longest]
    return seed


def random_input(random: Random, seeds: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Return a seed after a few edits by chance."""
    choices = (*WORDS, *words)
    number = 1 + min(int(random.expovariate(0.7)), 8)
    return mutated(random.choice(seeds), [Edit.random(random, choices) for _ in range(number)])


def words_of(seeds: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the words that seeds hold, each once."""
    return tuple(dict.fromkeys(match[0] for seed in seeds for match in _TOKEN.finditer(seed)))[:500]


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return each value inside a document, as its container and key."""
    found: list[tuple[Any, Any]] = []
    left = [document]
    while left:
        each = left.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            left.append(each[key])
    return found
