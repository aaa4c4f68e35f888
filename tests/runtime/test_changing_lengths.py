"""The length of the sequences, and the number of token slices, may change from batch to batch."""

from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ext.plan.found_schedule import FoundSchedule
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, batches_of, build, weights

CUT = (9, 1, 14)
CUTS = (CUT, (8, 4), (17,), CUT, (4, 4, 4, 4), (12, 8))


def _train(setup: Setup, cuts: tuple[tuple[int, ...], ...], keywords: dict[str, Any]) -> dict[str, Any]:
    engine = build(setup, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02), **keywords)
    losses = []
    for step, cut in enumerate(cuts):
        data = iter(batches_of(setup, 0, step=step, seq=sum(cut)))
        losses.append(engine.train_batch(data, token_slices=cut).item())
    return {
        "losses": losses,
        "weights": weights(engine),
        "schedule": type(engine._programs._training._schedule).__name__,
    }


def _whole(cuts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((sum(cut),) for cut in cuts)


@pytest.mark.parametrize(
    ("setup", "keywords"),
    [
        (Setup(pp=2, cut=CUT, dtype="fp64"), {}),
        (Setup(pp=2, cut=CUT, dtype="fp64", schedule="zero-bubble"), {"activation_spec": None}),
        (
            Setup(pp=2, cut=CUT, dtype="fp64", schedule="interleaved", model_chunks=2),
            {"activation_spec": None, "dynamic_shape": True},
        ),
    ],
    ids=str,
)
def test_lengths_change_and_nothing_else_does(setup: Setup, keywords: dict[str, Any]) -> None:
    (expected,) = run_distributed(_train, 1, Setup(cut=(models.SEQ,), dtype="fp64"), _whole(CUTS), {})
    for found in run_distributed(_train, 2, setup, CUTS, keywords):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for name, weight in found["weights"].items():
            if name == "tied_modules.embedding.position" and "1.norm.weight" not in found["weights"]:
                continue  # The head's copy of the embedding has positions that nothing reads.
            assert np.allclose(weight, expected["weights"][name], rtol=1e-11, atol=1e-12), name


def test_an_optimised_schedule_is_found_for_each_number_of_token_slices() -> None:
    setup = Setup(pp=2, cut=CUT, dtype="fp64", schedule="optimised", micro_batches=3)
    expected = run_distributed(_train, 2, Setup(pp=2, cut=CUT, dtype="fp64", micro_batches=3), CUTS, {})
    for found, other in zip(run_distributed(_train, 2, setup, CUTS, {}), expected, strict=True):
        assert found["schedule"] == FoundSchedule.__name__
        assert found["losses"] == other["losses"]
