"""Public names are those of `__all__`, of the page, and of the imports of documents."""

import ast
import inspect
import re
from importlib import import_module

import pytest

from docs.extensions.public_names import public_modules, public_names
from tests.architecture.sources import ROOT
from tests.documents.blocks import blocks_of, written

PACKAGES = ("deepspeed_ext", "megatron_terapipe")
PUBLIC = frozenset(name for package in PACKAGES for name in public_names(package))
NAMES = ("own_model", "pretrain_own_model", "pretrain_huggingface_model", "learn_token_slices")
PROGRAMS = [ROOT / "examples" / f"{name}.py" for name in NAMES]


def imported(text: str) -> set[str]:
    """Names of ours that a program imports."""
    return {
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
        for each in node.names
    }


def test_all_is_on_the_page() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```\{public-names\} (\S+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(f"{one}.{each}" for one in PACKAGES for each in import_module(one).__all__)
    assert len(PUBLIC) > 100


@pytest.mark.parametrize("package", PACKAGES)
def test_listed_names_exist(package: str) -> None:
    for module, names in public_modules(package):
        for name in names:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"


def test_documents_and_examples_import_nothing_else() -> None:
    texts = [block.text for page in written() for block in blocks_of(page) if block.language == "python"]
    texts += [path.read_text(encoding="utf-8") for path in PROGRAMS]
    found = set().union(*map(imported, texts))
    assert len(found) > 20
    assert not found - PUBLIC, "name them in `__all__`, or import others"
