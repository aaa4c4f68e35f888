"""Docstrings of public functions with arrays give their shapes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import modules, tree_of, where

ALIAS = re.compile(r"^(\w+)(?:: TypeAlias)? = .*\b(?:NDArray|ndarray|Tensor)\b\[", re.MULTILINE)
"""A name that a module gives to a type of arrays."""
ALIASES = {name for path in modules().values() for name in ALIAS.findall(path.read_text(encoding="utf-8"))}
ARRAY = re.compile(rf"\b(Tensor|NDArray|ndarray|ArrayLike|ScalarOrArray|{'|'.join(sorted(ALIASES))})\b")
"""Types of arrays in an annotation."""
SHAPE = re.compile(r"\[[^\]\n]*\]|\b(scalar|broadcast)", re.IGNORECASE)
"""A shape such as [stages, token slices], or what stands for one."""
METHODS = {
    (owner.name, node.name)
    for path in modules().values()
    for owner in tree_of(path).body
    if isinstance(owner, ast.ClassDef)
    for node in owner.body
    if isinstance(node, ast.FunctionDef)
}
"""Classes and their methods."""
AS_IN = re.compile(r"\b(?:as in|[Ss]ee) `(\w+)`")
"""Says in which class, a protocol or a base, a method is documented in full."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of a module, and methods of its classes, that others may call."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for owner in [tree, *classes]:
        for node in owner.body:
            overloaded = isinstance(node, Function) and any(
                "overload" in ast.unparse(each) for each in node.decorator_list
            )
            if isinstance(node, Function) and not node.name.startswith("_") and not overloaded:
                yield node


def faults_of(function: Function) -> Iterator[str]:
    """What a docstring lacks."""
    docstring = ast.get_docstring(function) or ""
    if any((owner, function.name) in METHODS for owner in AS_IN.findall(docstring)):
        return
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    arguments = [each for each in arguments if each.arg not in ("self", "cls", "ctx")]
    types = [ast.unparse(each) for each in (*(each.annotation for each in arguments), function.returns) if each]
    if any(ARRAY.search(each) for each in types) and not SHAPE.search(docstring):
        yield f"{function.name} has arrays and gives no shape, such as [stages, token slices]"


def faults_in(path: Path) -> list[str]:
    """What the docstrings of a module lack, and where."""
    functions = public_functions(tree_of(path))
    return [f"{where(path, each.lineno)} {fault}" for each in functions for fault in faults_of(each)]


def test_public_functions_give_the_shapes_of_arrays() -> None:
    faults = [fault for path in modules().values() for fault in faults_in(path)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ('def f(one, two): "Return."', 0),
        ('def f(one: Tensor): "Return."', 1),
        ('def f(one) -> dict[str, NDArray[np.float64]]: "Return."', 1),
        ('def f(one: Tensor): "Sums over [rows, tokens]."', 0),
        ('def f(one: Floats): "Arguments broadcast."', 0),
        ('def _f(one: Tensor, two): "Return."', 0),
        ('def forward(one: Tensor, two): "Return, as in `AttentionKernel`."', 0),
        ('def f(one: Tensor, two): "Return, as in `AttentionKernel`."', 1),
        ('class C:\n    def f(self, one: Tensor): "Return."', 1),
        ('class _C:\n    def f(self, one: Tensor): "Return."', 0),
    ],
)
def test_what_is_missed(source: str, number: int) -> None:
    assert sum(len(list(faults_of(each))) for each in public_functions(ast.parse(source))) == number
