"""Every package that is imported is declared in setup.py, with the least version."""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import setuptools
from packaging.requirements import Requirement

from tests.architecture.sources import CODE, ROOT, documents, imports_of, python_files, tree_of

PACKAGE_OF = {
    **{"yaml": "pyyaml", "pydantic_core": "pydantic", "megatron": "megatron-core", "xdist": "pytest-xdist"},
    **{"docutils": "sphinx", "pygments": "sphinx", "triton": "torch"},
}
"""Packages whose modules have other names, or that come with another whose interface hands them out."""

OURS = {
    "deepspeed_ext",
    "megatron_terapipe",
    "pretrain_gpt",
    "benchmarks",
    "tests",
    "examples",
    "docs",
    "transformers_layers",
}
NOT_DECLARED = {"apex", "amp_C", "flash_attn_interface", "setuptools"}
"""NVIDIA's apex and kernels, which are not on PyPI and are imported where they are, and the builder of the package."""


def declared() -> tuple[list[Requirement], list[Requirement]]:
    """The requirements of setup.py, and those of its extras."""
    found: dict[str, Any] = {}
    setup, setuptools.setup = setuptools.setup, found.update
    try:
        path = ROOT / "setup.py"
        names = {"__file__": str(path), "__name__": "__main__"}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)  # noqa: S102 - our own file
    finally:
        setuptools.setup = setup
    extras = [word for words in found["extras_require"].values() for word in words]
    return [Requirement(word) for word in found["install_requires"]], [Requirement(word) for word in extras]


def called(node: ast.Call) -> str:
    """The last name of a function that is called; empty if it has none."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def imported(paths: Iterable[Path]) -> set[str]:
    """The packages of others that files import, `import_module("name")` included."""
    names = set()
    for path in paths:
        names |= {each.target.split(".")[0] for each in imports_of(path)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and node.args and called(node).endswith("import_module"):
                first = node.args[0]
                head = first.values[0] if isinstance(first, ast.JoinedStr) else first
                if isinstance(head, ast.Constant):
                    names.add(str(head.value).split(".")[0])
    return {PACKAGE_OF.get(name, name) for name in names - sys.stdlib_module_names - OURS - NOT_DECLARED}


def test_every_import_is_declared() -> None:
    needed, extras = declared()
    names = {each.name for each in [*needed, *extras]}
    missing = sorted(imported(python_files(*CODE, "benchmarks", "docs", "examples", "tests")) - names)
    assert not missing, f"imported and not in setup.py: {', '.join(missing)}"


def test_every_package_has_a_least_version_and_deepspeed_a_last() -> None:
    needed, extras = declared()
    for each in [*needed, *extras]:
        assert any(bound.operator in (">=", "==") for bound in each.specifier), f"{each.name} has no least version"
    (deepspeed,) = [each for each in needed if each.name == "deepspeed"]
    assert "0.20" not in deepspeed.specifier, "its engine's hooks are those of 0.19.8"


def test_apex_of_pypi_is_never_installed() -> None:
    """It is another package than NVIDIA's, by others."""
    needed, extras = declared()
    assert "apex" not in {each.name for each in [*needed, *extras]}
    texts = [*documents(), ROOT / "Makefile", *python_files(*CODE, "examples", "benchmarks")]
    found = [path for path in texts if re.search(r"pip3? install[^\n`]*\bapex\b", path.read_text(encoding="utf-8"))]
    assert not found
