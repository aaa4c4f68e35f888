"""Reading a checkpoint runs no program in its files."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint

from deepspeed_ext.runtime.saved_files import UnsafeFileError, load_saved, only_safe_files
from tests.distributed import run_distributed
from tests.hostile_files import Calls, hostile_zip, legacy_torch_file, plain_pickle, poison
from tests.runtime.training import Setup, as_numpy, build, losses, weights


def test_tensors_values_and_deepspeeds_classes_are_read(tmp_path: Path) -> None:
    scaler = DynamicLossScaler(2.0**16, 2.0, 100, 1.0, 2, False, torch.float16)
    objects = {"step": 3, "weight": torch.arange(3.0), "where": fragment_address(4, 5), "scaler": scaler}
    torch.save(objects, tmp_path / "file.pt")
    assert get_unsafe_globals_in_checkpoint(tmp_path / "file.pt"), "these need the list"
    found = load_saved(tmp_path / "file.pt")
    assert found["step"] == 3 and found["where"] == fragment_address(4, 5) and found["scaler"].cur_scale == 2.0**16
    assert torch.equal(found["weight"], objects["weight"])


@pytest.mark.parametrize("write", [hostile_zip, legacy_torch_file, plain_pickle])
def test_programs_do_not_run(tmp_path: Path, write: Callable[[Path, Path], None]) -> None:
    path, hit = tmp_path / "layer_00.pt", tmp_path / "hit"
    write(path, hit)
    with pytest.raises((UnsafeFileError, RuntimeError)):
        load_saved(path)
    with pytest.raises(Exception, match=r"."), only_safe_files(tmp_path):
        torch.load(path, weights_only=False)
    assert not hit.exists()
    # Without the protection the same file does run a program.
    with suppress(AttributeError, RuntimeError):  # Its result is no dictionary of weights.
        torch.load(path, weights_only=False)
    assert hit.exists()


def test_one_line_names_the_file_and_its_function(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"more": Calls(Path.touch, tmp_path / "hit")}, path)
    with pytest.raises(UnsafeFileError, match="could run a program, and did not: load a checkpoint") as caught:
        load_saved(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert "pathlib" in str(caught.value) or "getattr" in str(caught.value)


class Reduced:
    """Is saved as the attribute of an object, as Python 3.11.0 to 3.11.3 save members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (self._owner, self._name)


def test_of_attributes_only_members_of_enumerations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"zero_stage": Reduced(ZeroStageEnum, "gradients")}, path)
    assert load_saved(path) == {"zero_stage": ZeroStageEnum.gradients}
    with only_safe_files(tmp_path):
        assert torch.load(path, weights_only=False) == {"zero_stage": ZeroStageEnum.gradients}
    for other in (
        Reduced(ZeroStageEnum, "__init__"),
        Reduced(LossScaler, "__init__"),
        Reduced(fragment_address(1, 2), "count"),
    ):
        torch.save({"more": other}, path)
        with pytest.raises(UnsafeFileError, match="names getattr, which could run a program"):
            load_saved(path)


def test_variables_of_torch_are_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = dict(os.environ)
    torch.save({"more": Calls(Path.touch, tmp_path / "hit")}, tmp_path / "file.pt")
    with pytest.raises(UnsafeFileError), only_safe_files(tmp_path):
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert dict(os.environ) == before and not (tmp_path / "hit").exists()


SETUP = Setup(pp=1, cut=(24,), zero=1)
FILES = ("mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def _error(engine: Any, folder: str, tag: str) -> str:
    try:
        engine.load_checkpoint(folder, tag)
    except UnsafeFileError as error:
        return str(error)
    return "loaded"


def _save_and_load_poisoned(folder: str) -> list[str]:
    """Errors of an engine that saves, and loads with one file after the other poisoned, which DeepSpeed reads."""
    engine = build(SETUP, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
    losses(engine, SETUP, 1)
    errors = []
    for name in FILES:
        engine.save_checkpoint(folder, tag=name)
        poison(Path(folder, name, name), Path(folder, "hit"))
        errors.append(_error(engine, folder, name))
    engine.save_checkpoint(folder, tag="whole", client_state={"mine": 7})
    errors.append(str(engine.load_checkpoint(folder, "whole")[1]["mine"]))
    return errors


def _train_and_save(directory: str, setup: Setup) -> dict[str, Any]:
    engine = build(setup)
    losses(engine, setup, 1)
    before = weights(engine)
    if setup.dtype == "fp32":
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
    engine.save_16bit_model(directory)
    state = {name: as_numpy(weight) for name, weight in engine.module_state_dict().items()}
    full = [safe_get_full_fp32_param(weight) for weight in engine.module.parameters()]
    return {"weights": before, "state": state, "full": None if full[0] is None else [as_numpy(each) for each in full]}


def test_weights_of_all_stages_are_saved_in_one_file(tmp_path: Path) -> None:
    by_rank = run_distributed(_train_and_save, 2, str(tmp_path), Setup(pp=2, cut=(12, 12)))
    whole = torch.load(tmp_path / "pytorch_model.bin")
    expected = by_rank[1]["weights"] | by_rank[0]["weights"]
    assert whole.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(as_numpy(whole[name]), weight), name
    for found in by_rank:
        assert found["state"].keys() == found["weights"].keys()
        # In fp32 the weight itself is the one that DeepSpeed would look up.
        assert found["full"] is None


def _on_one(directory: str) -> tuple[list[str], dict[str, Any]]:
    bf16 = Setup(cut=(12, 12), dtype="bf16")
    return _save_and_load_poisoned(directory), _train_and_save(f"{directory}/bf16", bf16)


def test_deepspeed_reads_checkpoints_safely_and_finds_fp32_copies_of_bf16_weights(tmp_path: Path) -> None:
    ((errors, found),) = run_distributed(_on_one, 1, str(tmp_path))
    assert errors[-1] == "7"
    for name, line in zip(FILES, errors, strict=False):
        assert line.startswith(f"a file of {tmp_path / name} names ") and "could run a program, and did not" in line
    assert not (tmp_path / "hit").exists()
    for full, weight in zip(found["full"], found["weights"].values(), strict=True):
        assert full.dtype == np.float32
        assert np.allclose(full, weight, rtol=1e-2)
