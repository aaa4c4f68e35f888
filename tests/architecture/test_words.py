"""Plain words in docstrings and messages: CONTRIBUTING.md, section Language."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

SUBSTITUTE = r"(those|that)\s+of"
"""Words that stand for a noun."""

WORDS = {
    r"what(?!-if)": "the noun that is meant",
    r"says?|said|tells?|told|speaks?|hears?|heard": "is, gives, reports, names",
    r"knows?|knew|wants?|wanted|believes?": "has, needs, expects",
    r"who|whom|nobody|somebody|anybody|everybody|no one": "the rank, process, caller or user",
    r"alone": "only",
    r"behind": "after",
    r"mend(s|ed|ing)?": "fix",
    r"for want of|anew|take note|lets? go": "missing; again; record; free",
    r"stands?|stood": "is, is stored, means",
    r"lies?|lay": "is, is at",
    r"put(s|ting)? off": "defer",
    r"(?<!there )(is|are)\s+no(?!\s+(longer|more|less|better|worse|earlier|later)\b)": "is not a, are not",
    r"round and round": "stage modulo the number of ranks; over and over",
    r"there and back": "the stages fold back; both ways",
    SUBSTITUTE: "the noun that is meant",
}
"""Patterns of the worst words, and the words in their place."""

NOTES_OF_ANSWERS = tuple(
    f"megatron_terapipe/search/{name}.py"
    for name in ("answer/what_if", "learn/costs", "machine/cluster_files", "price/profile_times")
)
"""Files with notes of answers, whose words scripts may compare: "those of" stays in them."""

FOLDERS = ("deepspeed_ext", "megatron_terapipe", "benchmarks", "examples", "pretrain_gpt.py")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, texts of fields, and strings of several words, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def words_in(source: str, *, but: tuple[str, ...] = ()) -> list[str]:
    """Return the worst words of a source, with line and remedy."""
    return [
        f"{line}: {match[0]!r}: write {remedy}"
        for line, text in texts(source)
        for pattern, remedy in WORDS.items()
        if pattern not in but
        for match in re.finditer(rf"\b({pattern})\b", text, re.IGNORECASE)
    ]


def sources() -> Iterator[Path]:
    """Yield the Python files whose texts people read."""
    for name in FOLDERS:
        yield from [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))


def test_docstrings_and_messages_have_plain_words() -> None:
    found = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        but = (SUBSTITUTE,) if name in NOTES_OF_ANSWERS else ()
        found += [f"{name}:{each}" for each in words_in(path.read_text("utf-8"), but=but)]
    assert not found, "\n".join([f"{len(found)} words (CONTRIBUTING.md, Language)", *found])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""What is left of it."""', 1),
        ('raise ValueError(f"{name} stands twice: mend it")', 2),
        ('"""A what-if of the search, whose price is known."""', 0),
        ('"""Ops of a rank after those\nof another; that of a stage is no forward, and is no longer."""', 3),
        ('name = "what"', 0),
    ],
)
def test_words_are_found(source: str, count: int) -> None:
    assert len(words_in(source)) == count
