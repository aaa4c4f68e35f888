"""Counts of a checkout: folders, files, lines, and import circles.

python -m tests.architecture.census [CHECKOUT ...]
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.architecture.sources import CODE, ROOT

SEARCH = "megatron_terapipe/search"
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
"""Tokens that are no code."""


def code_lines(text: str) -> int:
    """Return the number of lines with code: neither blank, nor comments, nor docstrings."""
    texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    docstrings = [each for each in texts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    said = {line for each in docstrings for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    return len(code - said)


def folders_in_a_circle(checkout: Path, files: Sequence[str]) -> list[str]:
    """Return folders that import each other, directly or through others, anywhere in their files; empty if none do."""
    folders = {str(Path(each).parent) for each in files}
    graph: dict[str, set[str]] = {}
    for each in files:
        if each.endswith("__main__.py"):  # It starts a command, and no module imports it.
            continue
        here = str(Path(each).parent)
        for node in ast.walk(ast.parse((checkout / each).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in CODE:
                path = node.module.replace(".", "/")
                there = path if path in folders else str(Path(path).parent)
                if there in folders and there != here:
                    graph.setdefault(here, set()).add(there)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts of each checkout; return 0."""
    words = sys.argv[1:] if argv is None else argv
    for checkout in [Path(each) for each in words] or [ROOT]:
        listed = subprocess.run(
            ["git", "ls-files", *CODE, "pretrain_gpt.py"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.split()
        everything = [each for each in listed if each.endswith(".py")]
        print(checkout)
        for name, files in (
            ("all", everything),
            (SEARCH, [each for each in everything if each.startswith(SEARCH)]),
        ):
            texts = [(checkout / each).read_text(encoding="utf-8") for each in files]
            circle = folders_in_a_circle(checkout, files)
            print(
                f"  {name:25} {len({str(Path(each).parent) for each in files}):4} folders {len(files):4} files "
                f"{sum(text.count(chr(10)) for text in texts):6,} lines {sum(map(code_lines, texts)):6,} of code   "
                f"circle of folders: {' imports '.join(reversed(circle)) or 'none'}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
