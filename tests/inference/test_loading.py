"""Weights from a checkpoint into a model with all its layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_terapipe.errors import CheckpointError
from megatron_terapipe.inference import WholeModel
from tests.inference.checkpoints import MODEL, write_checkpoint


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_every_weight_comes_back(tmp_path: Path, untied: bool) -> None:
    model = replace(MODEL, untie_embeddings_and_output_weights=untied)
    directory = write_checkpoint(tmp_path, model)
    fresh = WholeModel(model, base_seed=99)
    saved = WholeModel(model).state_dict()
    assert not torch.equal(fresh.state_dict()["layers.0.weight"], saved["layers.0.weight"])
    loaded = fresh.load(directory).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _scribble(path: Path) -> None:
    path.write_bytes(b"this was never a layer\n" * 20)


def _other_layer(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize("damage", [_remove, _empty, _cut_short, _scribble, _other_layer])
def test_a_damaged_layer_is_named(tmp_path: Path, damage) -> None:
    directory = write_checkpoint(tmp_path)
    path = directory / "layer_03-model_00-model_states.pt"
    damage(path)
    with pytest.raises(CheckpointError, match=f"cannot load layer 3 from {path} .*: save it again") as caught:
        WholeModel(MODEL).load(directory)
    assert "\n" not in str(caught.value)
