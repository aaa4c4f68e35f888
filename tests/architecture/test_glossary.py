"""One concept, one word: docs/reference/glossary.md says which, and this test that no other is used.

Names are looked at where they are given, so that what others named, such as DeepSpeed's `get_slice_parallel_rank`, can
be used. Words that are quoted or stand in a code span are talked about, not used.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture.sources import BESIDE, CODE, documents, python_files, tree_of, where

BANNED_FILES = {"utils.py", "helpers.py", "misc.py"}
BANNED_NAME_PARTS = {"degree", "mp", "v2"}
NEEDED_BEFORE = {"slice": "token", "slices": "token", "chunk": "model", "chunks": "model"}
"""Words that mean something only after another."""
BARE_WORD = re.compile(
    r"(?<![-\w])(?P<word>slices?|chunks?)(?![\w(])",  # not in a flag of others, and not the built-in slice(...)
    re.IGNORECASE,
)
COMMANDS = {"slices"}
"""Words that are the name of a command, where they stand alone in a string."""
MENTION = re.compile(r'``[^`]*``|`[^`]*`|"[^"\n]*"')
EVERYTHING = python_files(*CODE, *BESIDE)


def name_parts(name: str) -> list[str]:
    """`numTokenSlices` and `num_token_slices` in lower-case words."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+", name)]


def faults_of_name(name: str) -> Iterator[str]:
    """What is wrong with a name of ours."""
    parts = name_parts(name)
    for before, part in pairwise(["", *parts]):
        if part in BANNED_NAME_PARTS:
            yield f"{name}: {part!r} is banned"
        if NEEDED_BEFORE.get(part, before) != before:
            yield f"{name}: {part!r} without {NEEDED_BEFORE[part]!r}"


def faults_of_text(text: str) -> Iterator[tuple[int, str]]:
    """What is wrong with a text for people, and at which line of it."""
    # Blanked, not cut out, so that lines can still be counted.
    text = MENTION.sub(lambda mention: re.sub(r"\S", " ", mention[0]), text)
    for match in BARE_WORD.finditer(text):
        needed = NEEDED_BEFORE[match["word"].lower()]
        # The word before may stand on the line before, after the mark of a comment.
        if not re.search(rf"\b{needed}[\s#]+$", text[: match.start()], re.IGNORECASE):
            yield text.count("\n", 0, match.start()), f"{match['word']!r} without {needed!r}"


def names_given(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a module gives, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def texts_in_code(path: Path) -> Iterator[tuple[int, str]]:
    """Strings, where f-strings have blanks for their values, and comments, those of consecutive lines together."""
    inner = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(part.value if isinstance(part, ast.Constant) else " 0 " for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            if node.value not in COMMANDS:
                yield node.lineno, node.value
    block, start, end = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != end + 1:
                yield start, block
                block, start = "", token.start[0]
            block, end = f"{block}{token.string}\n", token.start[0]
    yield start, block


def test_names() -> None:
    faults = [
        f"{where(path, line)} {fault}"
        for path in EVERYTHING
        for line, name in names_given(tree_of(path))
        for fault in faults_of_name(name)
    ]
    faults += [f"{path}: name it after what it does" for path in EVERYTHING if path.name in BANNED_FILES]
    assert not faults, "\n".join(faults)


def test_texts_in_code() -> None:
    faults = [
        f"{where(path, line + offset)} {fault}"
        for path in python_files(*CODE, "benchmarks", "examples")
        for line, text in texts_in_code(path)
        for offset, fault in faults_of_text(text)
    ]
    assert not faults, "\n".join(faults)


def test_documents() -> None:
    faults = [
        f"{where(path, offset + 1)} {fault}"
        for path in documents()
        for offset, fault in faults_of_text(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_no_bag_of_arguments_and_no_global_state() -> None:
    faults = []
    nodes = [(path, node) for path in EVERYTHING for node in ast.walk(tree_of(path))]
    for path, node in nodes:
        match node:
            case ast.arg(arg="args"):
                faults.append(f"{where(path, node.lineno)} a parameter named args: say of what")
            case ast.Global():
                faults.append(f"{where(path, node.lineno)} global: hand it over instead")
            case ast.FunctionDef(name="get_args") | ast.Attribute(attr="get_args"):
                faults.append(f"{where(path, node.lineno)} get_args: hand the section over instead")
            case ast.ImportFrom(module=module, names=names) if module != "typing":
                if any(alias.name == "get_args" for alias in names):
                    faults.append(f"{where(path, node.lineno)} get_args: hand the section over instead")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "sound"),
    [
        ("token_slice", True),
        ("TokenSlices", True),
        ("num_token_slices", True),
        ("islice", True),
        ("num_model_chunks", True),
        ("slice_index", False),
        ("SliceState", False),
        ("num_slices", False),
        ("chunk", False),
        ("_chunk_ends", False),
        ("pp_degree", False),
        ("mp", False),
    ],
)
def test_which_names_are_sound(name: str, sound: bool) -> None:
    assert sound == (not list(faults_of_name(name)))


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("token slices", True),
        ("Token slice 3, a token-slice pipeline, --token-slices 4, token_slice", True),
        ("# of each token\n# slice", True),
        ("a model chunk", True),
        ('DeepSpeed says "slice parallel", and `slice` is Python\'s', True),
        ("cut by slice(0, 4)", True),
        ("--retro-num-retrieved-chunks", True),
        ("the slice before", False),
        ("micro-batches and slices", False),
        ("tokens. Slices", False),
        ("a chunk of text", False),
    ],
)
def test_which_texts_are_sound(text: str, sound: bool) -> None:
    assert sound == (not list(faults_of_text(text)))
