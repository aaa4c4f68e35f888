"""A checkpoint from another source, also of another trainer, runs no code in any command that reads it."""

import enum
import json
import os
import pickle
import resource
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepspeed_ext.runtime.saved_files import load_saved
from megatron_terapipe import convert, generate
from megatron_terapipe.checkpoint.inert_pickles import Inert, load_without_tensors
from megatron_terapipe.checkpoint.megatron_files import TensorUnpickler, load_inert
from megatron_terapipe.checkpoint.optimizer_state import _moments
from megatron_terapipe.checkpoint.restore import damage_in_one_line
from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.huggingface.folder_weights import SavedTensors
from megatron_terapipe.inference import WholeModel
from tests.hostile_files import Calls, hostile_zip, legacy_torch_file, plain_pickle, poison
from tests.huggingface.models import MODELS, save, whole_model
from tests.inference.checkpoints import MODEL, write_checkpoint, write_manifest

LAYER = "layer_03-model_00-model_states.pt"


@pytest.mark.parametrize("attack", [poison, hostile_zip, legacy_torch_file, plain_pickle])
def test_a_layer_is_refused_in_one_line_that_names_its_file(
    tmp_path: Path, attack: Callable[[Path, Path], None]
) -> None:
    directory = write_checkpoint(tmp_path)
    attack(directory / LAYER, tmp_path / "hit")
    with pytest.raises(CheckpointError) as caught:
        WholeModel(MODEL).load(directory)
    assert str(directory / LAYER) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0.pt"]
)
def test_counters_and_states_of_the_optimizer_are_refused(tmp_path: Path, name: str) -> None:
    torch.save({"global_steps": 3, "optimizer_state_dict": Calls(Path.touch, tmp_path / "hit")}, tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} names .*, which could run a program, and did not"):
        load_saved(tmp_path / name)
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("command", ["generate", "convert"])
def test_commands_end_in_one_line(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS["llama"]
    directory = save(whole_model(model), model, tmp_path / "saved")
    poison(directory / LAYER, tmp_path / "hit")
    write_manifest(directory)
    words = ["--load", str(tmp_path / "saved")]
    if command == "generate":
        words += ["--prompt", "1 2", "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
        assert generate.main(words) == 2
    else:
        assert convert.main(["to-huggingface", *words, "--output", str(tmp_path / "out")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"{LAYER} names " in line and "could run a program, and did not" in line
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_of_shards_reads_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    shutil.copy(__file__, tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match=f'names "{name}", which is not a file of this folder'):
        SavedTensors(folder)


STRANGE: dict[str, object] = {
    "sparse": torch.eye(32).to_sparse(),
    "compressed": torch.eye(32).to_sparse_csr(),
    "meta": torch.empty(32, 32, device="meta"),
    "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantized": torch.quantize_per_tensor(torch.ones(32), 0.1, 0, torch.quint8),
    "repeated": torch.zeros(1).expand(1 << 40),
    "text": "abc",
    "none": None,
    "allocated": Calls(bytearray, 6 << 30),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_of_strange_kinds_are_one_line(tmp_path: Path, kind: str) -> None:
    directory = write_checkpoint(tmp_path)
    layer = torch.load(directory / LAYER, weights_only=True)
    for content in (*({**layer, name: STRANGE[kind]} for name in (next(iter(layer)), "another")), [STRANGE[kind]]):
        torch.save(content, directory / LAYER)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CheckpointError) as caught:
            WholeModel(MODEL).load(directory)
        line = str(caught.value)
        assert (str(directory / LAYER) in line and "\n" not in line and ": load " in line) or ": save it again" in line
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"


def test_states_of_strange_kinds_are_one_line(tmp_path: Path) -> None:
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3), "momentum_buffer": None, "rate": 0.5}
    assert {name: each.shape for name, each in _moments(state).items()} == {"exp_avg": (6,)}
    for read in (lambda: _moments({"exp_avg": "text"}), lambda: _moments({"exp_avg": None})["exp_avg"]):
        with pytest.raises(CheckpointError, match=r"^checkpoint .* cannot be loaded \(.*\): load another"):
            with damage_in_one_line(tmp_path):
                read()
    for error in (CheckpointError("a: b"), torch.OutOfMemoryError("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, damage_in_one_line(tmp_path):
            raise error
        assert caught.value is error


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
        *(Calls(os.mkdir, str(made)), Calls(os.system, f"mkdir {made}"), Calls(torch.load, str(made))),
        *(Calls(eval, f"__import__('os').mkdir({str(made)!r})"), Calls(bytearray, 10**15)),
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
    (tmp_path / "metadata").write_bytes(pickle.dumps({"size": torch.Size([2]), "call": Calls(os.getcwd)}))
    with (tmp_path / "metadata").open("rb") as file:
        found = TensorUnpickler(file).load()
    assert found["size"] == (2,) and isinstance(found["call"], Inert)
