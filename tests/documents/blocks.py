"""The code blocks of the documents."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.sources import ROOT, documents

SHELL = (
    "terapipe",
    "python",
    "deepspeed ",
    "make",
    "bash",
    "pip",
    "git",
    "time",
    "torchrun",
    "docker",
    "cp",
    "DS_",
    "TORCH_",
)
"""Words that the first line of an indented block of shell commands starts with."""
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```|(?:(?<=\n\n)|\A)((?:(?:    [^\n]*)?\n)+)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([\w-]+\.(?:json|ya?ml|jsonl|txt))`")
_NOT_RUN = re.compile(r"<!-- not run: (.*?) -->")
_INLINE = re.compile(r"`((?:terapipe|python|deepspeed|make|bash) [^`]+)`")


@dataclass(frozen=True)
class Block:
    """One block of a document."""

    path: Path
    line: int
    """Line at which the block starts."""
    language: str
    """`shell`, the word behind the fence, or `text` for an indented block that is no shell."""
    text: str
    """The block, without fence and indentation."""
    file_name: str | None
    """Last file name in the paragraph before the block, None if it names none."""
    not_run: str | None
    """Why its commands are not run, from a comment before the block, or from one of the page ("this page"); or None."""

    @property
    def where(self) -> str:
        """The place of the block, as an editor opens it."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Its lines for a shell, each a command."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def written() -> list[Path]:
    """Return the documents that are written by hand."""
    return [path for path in documents() if path.name != "CHANGELOG.md"]


def blocks_of(path: Path) -> list[Block]:
    """Return the blocks of a document, first to last."""
    text = path.read_text(encoding="utf-8")
    found = []
    of_page = next((reason for reason in _NOT_RUN.findall(text) if "this page" in reason), None)
    for match in _BLOCK.finditer(text):
        fence, fenced, indented = match.groups()
        if (content := fenced or re.sub(r"^    ", "", indented or "", flags=re.MULTILINE).rstrip("\n")).strip():
            language = fence or ("shell" if content.startswith(SHELL) else "text")
            before = text[: match.start()].rstrip().rsplit("\n\n", 1)[-1]
            names, reasons = _NAME.findall(before), _NOT_RUN.findall(before)
            line = text.count("\n", 0, match.start()) + 1
            name, reason = (next(iter(each[-1:]), None) for each in (names, reasons))
            found.append(Block(path, line, language, content, name, reason or of_page))
    return found


def inline_commands(path: Path) -> list[list[str]]:
    """Return the words of commands that stand in a sentence."""
    sentences = _BLOCK.sub("", path.read_text(encoding="utf-8")).replace("\n", " ")
    return [shlex.split(text) for text in _INLINE.findall(sentences)]
