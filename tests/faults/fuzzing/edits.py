"""Changes that make a bad input out of a real one."""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (
    *b"0 -1 1 2 255 65536 2147483648 20000000 1000000000 9223372036854775807 9223372036854775808".split(),
    *b"10000000000000 0.5 -0.0 1e-320 1e30 1e308 -1e308 1e999 NaN Infinity -Infinity nan".split(),
    *(b"1" + b"0" * 24, b"1" + b"0" * 400, b"7" * 4400),
)
"""Numbers at the edges of types, and beyond sense."""

OTHERS = (
    *rb'null true false "" [] {} [[]] "x" "1" .inf "a\nb" "\ud800" 2024-13-45 2024-01-01 1:30'.split(),
    *b"../../x / . /dev/null , : = -- # -oProxyCommand=id".split(),
    *(b"", b" ", b"\n", b"\r\n", b"a\nb", b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\x1b[2J"),
    *("\u2028".encode(), "é".encode(), "\uff11\uff12".encode(), b"\xef\xbb\xbf", b'{"a": 1}', b"[1, 2]"),
    *(b"[" * 3000, b'{"a":' * 3000, b"- " * 2000, b"a" * 5000, b"$(touch x)"),
    *(b"&a [*a, *a]", b"!!python/object/apply:os.system [id]"),
)
"""Other words that parsers trip over."""

WORDS = (*NUMBERS, *OTHERS)

KINDS = "insert replace replace delete repeat flip cut value value value key splice".split()
"""Kinds of edits, the useful ones more often."""

LONGEST = 1 << 16
"""Bytes of an input at most."""

_TOKEN = re.compile(rb"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|[A-Za-z_][\w.-]*|\"[^\"\n]*\"")


def edited(data: bytes, random: Random, words: Sequence[bytes]) -> bytes:
    """Return an input after one change by chance."""
    word, start, extent = random.choice(words), random.randrange(len(data) + 1), random.random() ** 3
    end = min(len(data), start + 1 + int(extent * 64))
    match random.choice(KINDS):
        case "insert":
            return data[:start] + word + data[start:]
        case "replace":
            return _replaced(data, start, word)
        case "delete":
            return data[:start] + data[end:]
        case "repeat":
            return data[:start] + data[start:end] * (2 + int(extent * 1000)) + data[end:]
        case "flip":
            flipped = bytearray(data or b"\x00")
            flipped[min(start, len(flipped) - 1)] ^= 1 << random.randrange(8)
            return bytes(flipped)
        case "splice":
            lines = data.splitlines(keepends=True) or [b""]
            lines.insert(random.randrange(len(lines)), random.choice(lines))
            return b"".join(lines)
        case "value" | "key" as kind:
            try:
                document, value = json.loads(data), json.loads(word) if word else None
            except (ValueError, RecursionError):
                return _replaced(data, start, word)
            places = list(_places(document))
            if not places:
                return word
            container, key = random.choice(places)
            if kind == "key" and isinstance(container, dict):
                moved = container.pop(key)
                if random.random() < 0.5:
                    container[random.choice([f"{key}x", "a\nb"])] = moved
            else:
                container[key] = value
            # Python writes NaN and Infinity, which its parser also reads.
            return json.dumps(document).encode()
    return data[:start]


def random_input(random: Random, seeds: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """Return a seed after a few edits by chance."""
    data, choices = random.choice(seeds), (*WORDS, *words)
    for _ in range(1 + min(int(random.expovariate(0.7)), 8)):
        data = edited(data, random, choices)[:LONGEST]
    return data


def words_of(seeds: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the words that seeds hold, each once."""
    return tuple(dict.fromkeys(match[0] for seed in seeds for match in _TOKEN.finditer(seed)))[:500]


def _replaced(data: bytes, start: int, word: bytes) -> bytes:
    token = _TOKEN.search(data, start) or _TOKEN.search(data)
    return data if token is None else data[: token.start()] + word + data[token.end() :]


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
