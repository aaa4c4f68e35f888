"""Supported versions, and the private names of torch that the code uses."""

import ast
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from packaging.requirements import Requirement

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime import supported_versions
from deepspeed_ext.runtime.supported_versions import PRIVATE_NAMES, SUPPORTED_DEEPSPEED, SUPPORTED_TORCH, check_versions
from tests.architecture.sources import CODE, python_files, tree_of
from tests.architecture.test_dependencies import declared

LOADED_LATE = ("torch._dynamo", "torch._inductor", "torch.utils._pytree")
"""Names that load for seconds, for compiled functions only, and names that have stayed for years."""
HAS_A_PUBLIC_NAME = ("torch.distributed.distributed_c10d._set_pg_timeout",)
"""Names that the code uses only if the name of newer releases is missing."""
OF_AN_OBJECT = {"torch.distributed.group.WORLD": "torch.distributed.ProcessGroup"}
"""Objects through which the code calls methods, with their class."""


VERSIONS = {
    ("deepspeed", "0.19.2"): r"^deepspeed 0\.19\.2 is installed, .*: pip install 'deepspeed<0.20,>=0.19.8'$",
    ("deepspeed", "0.20.0"): r"^deepspeed 0\.20\.0 is installed, .*: pip install 'deepspeed<0.20,>=0.19.8'$",
    ("deepspeed", "0.19.12"): "",
    ("torch", "2.9.0a0+145a3a7bda.nv25.10"): "",  # an alpha of NVIDIA
    ("torch", "2.7.1+cu128"): r"^torch 2\.7\.1\+cu128 is installed, .*: pip install 'torch>=2\.8'$",
}


@pytest.mark.parametrize(("package", "installed"), VERSIONS)
def test_versions_are_refused_in_one_line(package: str, installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "torch":
        monkeypatch.setattr(torch, "__version__", installed)
    else:
        monkeypatch.setattr(supported_versions, "version", lambda _: installed)
    line = VERSIONS[package, installed]
    with pytest.raises(UserError, match=line) if line else nullcontext():
        check_versions()


def test_a_torch_without_a_private_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_versions()
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu140")
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    line = r"^torch 2\.99\.0\+cu140 has no torch\.distributed\.distributed_c10d\._get_default_store, .*<2\.99\.0'$"
    with pytest.raises(UserError, match=line):
        check_versions()


def test_setup_has_the_same_versions() -> None:
    of = {each.name: each for each in declared()[0]}
    assert of["deepspeed"] == Requirement(f"deepspeed{SUPPORTED_DEEPSPEED}")
    assert of["torch"] == Requirement(f"torch{SUPPORTED_TORCH}")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _dotted(node: ast.AST) -> str:
    """Names with dots between them; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return before and f"{before}.{node.attr}"


def _used() -> Iterator[str]:
    """Private names of torch that the code reaches from a module, by their full names."""
    for path in python_files(*CODE):
        nodes = list(ast.walk(tree_of(path)))
        names = {"torch": "torch"}
        for node in nodes:
            if isinstance(node, ast.ImportFrom | ast.Import):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names |= {alias.asname or alias.name: f"{module}{alias.name}" for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                head, dot, rest = _dotted(node.value).partition(".")
                if dot and names.get(head, "").startswith("torch"):
                    names[node.targets[0].id] = f"{names[head]}.{rest}"
        for node in nodes:
            if isinstance(node, ast.Attribute):
                head, _, rest = _dotted(node).partition(".")
                full = f"{names.get(head, '')}.{rest}"
                parts = full.split(".")
                if parts[0] == "torch" and any(map(_is_private, parts)):
                    yield full


def test_every_private_name_is_checked() -> None:
    used = set()
    for name in _used():
        for held, of_class in OF_AN_OBJECT.items():
            name = name.replace(held, of_class)
        used.add(name.removeprefix("torch."))
    used = {name for name in used if not f"torch.{name}".startswith((*LOADED_LATE, *HAS_A_PUBLIC_NAME))}
    assert len(used) > 10
    unknown = [name for name in used if not any(known.startswith(name) for known in PRIVATE_NAMES)]
    assert unknown == []
    texts = [path.read_text(encoding="utf-8") for path in python_files(*CODE) if path.stem != "supported_versions"]
    assert [name for name in PRIVATE_NAMES if not any(name.rpartition(".")[2] in text for text in texts)] == []
