"""Training continues from a checkpoint bit for bit, and a checkpoint does not depend on token slices."""

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
SETUPS = [
    Setup(pp=2),
    Setup(pp=2, cut=CUT),
    Setup(pp=2, cut=CUT, zero=1),
    Setup(pp=2, dp=2, cut=CUT, zero=1, tied=False),
]
BEFORE, AFTER = 2, 3


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _train_and_save(setups: list[Setup], directory: str) -> list[dict[str, Any]]:
    found = []
    for setup in setups:
        engine = build(setup, optimizer=_adam)
        losses(engine, setup, BEFORE)
        engine.save_checkpoint(f"{directory}/{setup}")
        saved = weights(engine)
        later = losses(engine, setup, AFTER, first=BEFORE)
        found.append({"saved": saved, "losses": later, "weights": weights(engine)})
    return found


def _load_and_train(setups: list[Setup], directory: str) -> list[list[dict[str, Any]]]:
    return [[_loaded(each, f"{directory}/{setup}") for each in (setup, _with_other_cut(setup))] for setup in setups]


def _with_other_cut(setup: Setup) -> Setup:
    return replace(setup, cut=CUT if len(setup.cut) == 1 else (sum(CUT),))


def _loaded(setup: Setup, directory: str) -> dict[str, Any]:
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


@pytest.fixture(scope="module", params=[2, 4])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Setup], Path, Any]:
    directory = tmp_path_factory.mktemp("checkpoint")
    setups = [setup for setup in SETUPS if setup.world_size == request.param]
    return setups, directory, run_distributed(_train_and_save, request.param, setups, str(directory))


def _assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    if "tied_modules.embedding.position" in found and "1.norm.weight" not in found:
        # The head's copy of the embedding has positions that nothing reads. Only the embedding's are saved.
        found = {name: weight for name, weight in found.items() if name != "tied_modules.embedding.position"}
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []


def test_training_continues_bit_for_bit_in_other_processes_and_with_another_cut(
    saved: tuple[list[Setup], Path, Any],
) -> None:
    setups, directory, undisturbed = saved
    loaded = run_distributed(_load_and_train, setups[0].world_size, setups, str(directory))
    for of_rank, expected_of_rank in zip(loaded, undisturbed, strict=True):
        for (found, other), expected in zip(of_rank, expected_of_rank, strict=True):
            assert any(not np.array_equal(found["fresh"][name], expected["saved"][name]) for name in expected["saved"])
            _assert_same_bits(found["loaded"], expected["saved"])
            assert found["steps"] == BEFORE
            assert found["losses"] == expected["losses"]
            _assert_same_bits(found["weights"], expected["weights"])
            _assert_same_bits(other["loaded"], expected["saved"])
            # From the same weights the first loss differs only by rounding; Adam then makes more of it.
            assert other["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
            assert other["losses"] == pytest.approx(expected["losses"], rel=1e-3)


def test_layer_files_have_the_names_that_deepspeeds_tools_look_for(saved: tuple[list[Setup], Path, Any]) -> None:
    _, directory, _ = saved
    names = sorted(path.name for path in directory.rglob("layer_*"))
    assert "layer_01-model_00-model_states.pt" in names
    for name in names:
        assert re.match(LAYER_FILE_PREFIX_PATTERN, name)
        assert "token" not in name
