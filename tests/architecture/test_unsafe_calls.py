"""Calls that could run the content of a file, besides those that ruff's rules of flake8-bandit forbid.

Pickles run functions that they name. They are read through pipes between our own processes; and, of other trainers, by
an unpickler that constructs a few classes which hold values (`tests/checkpoint/test_hostile_checkpoint.py`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import CODE, ROOT, imports_of, python_files, tree_of, where

FILES = python_files(*CODE, "examples", "benchmarks")
READERS_OF_PICKLES = ("pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
INERT = "megatron_terapipe/checkpoint/inert_pickles.py"
ERROR = "UnpicklingError"
"""The error of torch for a refused pickle, a name that may be imported."""

KEYWORDS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "np.save": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
"""The keyword that each call must have, and its value."""

FORBIDDEN = ("torch.hub.load", "torch.jit.load", "os.system", "os.popen", "tempfile.mktemp", "os.umask")


def calls(source: str) -> Iterator[tuple[int, str, ast.Call]]:
    """Each call of a source text: line, dotted name, node."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def faults(source: str) -> list[str]:
    """The faults of a source text."""
    found = []
    for line, name, call in calls(source):
        given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
        inert = any(each.arg == "pickle_module" and ast.unparse(each.value) == "InertPickle" for each in call.keywords)
        if name in KEYWORDS and not inert and given.get(KEYWORDS[name][0]) is not KEYWORDS[name][1]:
            found.append(f"{line}: {name} without {KEYWORDS[name][0]}={KEYWORDS[name][1]}")
        if given.get("trust_remote_code") or name in FORBIDDEN:
            found.append(f"{line}: {name} runs the content of a file or of another host")
    return found


def test_no_call_reads_a_pickle_or_runs_its_input() -> None:
    found = [f"{path.relative_to(ROOT)}:{each}" for path in FILES for each in faults(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_no_reader_of_pickles_is_imported() -> None:
    found = [
        where(path, each.line)
        for path in FILES
        if path != ROOT / INERT
        for each in imports_of(path)
        if each.target.split(".")[0] in READERS_OF_PICKLES and _names_from_pickle(path) != {ERROR}
    ]
    assert not found, f"a reader of pickles is imported: {', '.join(found)}"


def _names_from_pickle(path: Path) -> set[str]:
    nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.module == "pickle")
    return {name.name for node in nodes for name in node.names}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, mmap_mode='r')",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "os.system('ls')",
    ],
)
def test_such_calls_are_found(source: str) -> None:
    assert faults(source)
    assert not faults("torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)")
