"""Training goes on from a checkpoint bit for bit, and a checkpoint knows nothing of token slices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.checkpoint.deepspeed_checkpoint import LAYER_FILE_PREFIX_PATTERN

from tests.distributed import run_distributed
from tests.runtime.training import Setup, build, losses, weights

CUT = (9, 1, 14)
SETUPS = [Setup(pp=2, cut=CUT), Setup(pp=2, cut=CUT, zero=1), Setup(pp=2, dp=2, cut=CUT, zero=1, tied=False)]
BEFORE, AFTER = 2, 3


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _train_and_save(setup: Setup, directory: str) -> dict[str, Any]:
    engine = build(setup, optimizer=_adam)
    losses(engine, setup, BEFORE)
    engine.save_checkpoint(directory)
    saved = weights(engine)
    return {"saved": saved, "losses": losses(engine, setup, AFTER, first=BEFORE), "weights": weights(engine)}


def _load_and_train(setup: Setup, directory: str) -> dict[str, Any]:
    engine = build(setup, optimizer=_adam, base_seed=99)  # other weights than those saved
    fresh = weights(engine)
    engine.load_checkpoint(directory)
    loaded = weights(engine)
    return {
        "fresh": fresh,
        "loaded": loaded,
        "steps": engine.global_steps,
        "losses": losses(engine, setup, AFTER, first=BEFORE),
        "weights": weights(engine),
    }


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Setup, Path, list[Any]]:
    directory = tmp_path_factory.mktemp("checkpoint")
    setup = request.param
    return setup, directory, run_distributed(_train_and_save, setup.world_size, setup, str(directory))


def _assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    if "tied_modules.embedding.position" in found and "1.norm.weight" not in found:
        # The head's copy of the embedding has positions that nothing reads. Only the embedding's are saved.
        found = {name: weight for name, weight in found.items() if name != "tied_modules.embedding.position"}
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


def _load_twice(setup: Setup, directory: str) -> list[dict[str, Any]]:
    return [_load_and_train(each, directory) for each in (setup, replace(setup, cut=(sum(CUT),)))]


def test_training_goes_on_bit_for_bit_in_fresh_processes_and_in_other_token_slices(
    saved: tuple[Setup, Path, list[Any]],
) -> None:
    setup, directory, undisturbed = saved
    loaded = run_distributed(_load_twice, setup.world_size, setup, str(directory))
    for (found, unsliced), expected in zip(loaded, undisturbed, strict=True):
        assert any(not np.array_equal(found["fresh"][name], expected["saved"][name]) for name in expected["saved"])
        _assert_same_bits(found["loaded"], expected["saved"])
        assert found["steps"] == BEFORE
        assert found["losses"] == expected["losses"]
        _assert_same_bits(found["weights"], expected["weights"])
        _assert_same_bits(unsliced["loaded"], expected["saved"])
        # From the same weights the first loss differs by rounding alone; Adam then makes more of it.
        assert unsliced["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
        assert unsliced["losses"] == pytest.approx(expected["losses"], rel=1e-3)


def test_a_checkpoint_without_token_slices_loads_with_them(tmp_path: Path) -> None:
    unsliced = Setup(pp=2)
    first = run_distributed(_train_and_save, 2, unsliced, str(tmp_path))
    for found, expected in zip(
        run_distributed(_load_and_train, 2, replace(unsliced, cut=CUT), str(tmp_path)), first, strict=True
    ):
        _assert_same_bits(found["loaded"], expected["saved"])
        assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)


def test_layer_files_have_the_names_that_deepspeeds_tools_look_for(saved: tuple[Setup, Path, list[Any]]) -> None:
    _, directory, _ = saved
    names = sorted(path.name for path in directory.rglob("layer_*"))
    assert names
    assert "layer_01-model_00-model_states.pt" in names
    for name in names:
        assert re.match(LAYER_FILE_PREFIX_PATTERN, name)
        assert "token" not in name
