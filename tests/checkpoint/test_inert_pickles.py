"""Pickles of other trainers: no function that they name is called, and none of their classes is constructed."""

import enum
import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_terapipe.checkpoint.inert_pickles import Inert, load_without_tensors
from megatron_terapipe.checkpoint.megatron_files import TensorUnpickler, load_inert


class Runs:
    """An object whose pickle makes a directory when it is read by Python's own unpickler."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_programs_of_torchscript_are_refused(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "file.pt"))
    with pytest.raises(ValueError, match="TorchScript"):
        load_inert(tmp_path / "file.pt")


@pytest.fixture
def foreign_class() -> Any:
    """A class of a module that is gone when the file is read."""
    module = sys.modules["trainer_elsewhere"] = ModuleType("trainer_elsewhere")
    module.Kind = enum.Enum("Kind", {"FLASH": 1}, module="trainer_elsewhere")  # type: ignore[attr-defined]
    yield module.Kind
    sys.modules.pop("trainer_elsewhere", None)


@pytest.mark.parametrize("load", [load_without_tensors, load_inert])
def test_no_function_of_a_file_is_called(load: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    hostile = [
        *(Runs(os.mkdir, str(made)), Runs(os.system, f"mkdir {made}"), Runs(torch.load, str(made))),
        *(Runs(eval, f"__import__('os').mkdir({str(made)!r})"), Runs(bytearray, 10**15)),
    ]
    torch.save({"args": Namespace(num_layers=2, hook=hostile), "iteration": 5}, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    assert not made.exists()
    assert found["args"].num_layers == 2 and all(isinstance(each, Inert) for each in found["args"].hook)


def test_values_and_tensors_are_kept_and_foreign_classes_are_inert(foreign_class: Any, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0, dtype=torch.bfloat16).view(2, 3))
    weight.grid = "an attribute"  # type: ignore[attr-defined]
    saved = {"args": Namespace(backend=foreign_class.FLASH, lr=1e-3), "model": {"weight": weight}}
    torch.save(saved, tmp_path / "file.pt")
    sys.modules.pop("trainer_elsewhere")
    found = load_inert(tmp_path / "file.pt")
    assert torch.equal(found["model"]["weight"], weight.detach())
    assert found["args"].lr == 1e-3 and isinstance(found["args"].backend, Inert)


def test_a_pickle_outside_of_torchs_files_is_read_in_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_bytes(pickle.dumps({"size": torch.Size([2]), "call": Runs(os.getcwd)}))
    with (tmp_path / "metadata").open("rb") as file:
        found = TensorUnpickler(file).load()
    assert found["size"] == (2,) and isinstance(found["call"], Inert)
