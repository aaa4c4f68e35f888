"""The files of the project, and their imports."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("deepspeed_ext", "megatron_terapipe")
"""Packages that are installed."""
BESIDE = ("benchmarks", "examples", "tests")
"""Folders that are not installed."""


def python_files(*folders: str) -> list[Path]:
    """The modules of folders, and those at the top."""
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))])


def documents() -> list[Path]:
    """The documents of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file. It stays: to look for garbage in all trees takes longer than to make them."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()


def where(path: Path, line: int) -> str:
    """A place, as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{line}"


@cache
def modules() -> dict[str, Path]:
    """Every module of the code by its dotted name, `pretrain_gpt` and `setup` among them."""
    return {_module_name(path): path for path in python_files(*CODE)}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Import:
    """One import statement's one target."""

    target: str
    """Dotted name of the module imported."""
    line: int
    runs_on_import: bool
    """Whether it runs when the importing module does: not in a function, and not only for types."""


@cache
def imports_of(path: Path) -> list[Import]:
    """The imports of a file, wherever in the file."""
    return list(_imports(tree_of(path), runs_on_import=True))


def _imports(node: ast.AST, *, runs_on_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, runs_on_import)
    elif isinstance(node, ast.ImportFrom):
        if node.level:  # in an example; ruff forbids it elsewhere
            return
        for alias in node.names:
            # `from package import name` imports the module `package.name` if there is one.
            inner = f"{node.module}.{alias.name}"
            yield Import(inner if inner in modules() else node.module, node.lineno, runs_on_import)
    else:
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            for_types = isinstance(node, ast.If) and child in node.body and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _imports(child, runs_on_import=runs_on_import and not is_function and not for_types)


def imported_when_importing(module: str) -> set[str]:
    """Modules of ours that Python runs before it has run this one, its own packages left out.

    Importing `a.b.c` from outside `a` first runs `a` and `a.b`.
    """
    reached = set()
    for each in imports_of(modules()[module]):
        parts = each.target.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            own_package = name == module or module.startswith(f"{name}.")
            if each.runs_on_import and name in modules() and (name == each.target or not own_package):
                reached.add(name)
    return reached - {module}
