"""Evaluation between training batches: any micro-batch size and count, all outputs, and no effect on training."""

from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import Reference
from tests.runtime.training import Setup, as_numpy, build

CUT = (9, 1, 8, 6)
SETUP = Setup(pp=2, cut=CUT)
EVAL_ROWS, EVAL_MICRO_BATCHES = 5, 3


def _held_out() -> Any:
    return iter(models.batches(EVAL_MICRO_BATCHES, EVAL_ROWS, seed=7))


def _gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _evaluations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = build(SETUP, optimizer=_gentle)
    sizes = {"num_micro_batches": EVAL_MICRO_BATCHES, "micro_batch_size": EVAL_ROWS}
    found["mean"] = engine.eval_batch(_held_out(), **sizes).item()
    found["by micro-batch"] = engine.eval_batch(_held_out(), reduce_output=None, **sizes)
    found["only outputs"] = engine.eval_batch(_held_out(), return_logits=True, compute_loss=False, **sizes)[1]
    found["loss of the last stage"] = engine.eval_batch(_held_out(), bcast_loss=False, **sizes)
    with pytest.raises(UserError, match="reduce_output='sum'"):
        engine.eval_batch(_held_out(), reduce_output="sum")
    for name in ("by micro-batch", "only outputs"):
        found[name] = found[name] and [as_numpy(tensor) for tensor in found[name]]
    loss = found["loss of the last stage"]
    found["loss of the last stage"] = loss if loss is None else loss.item()
    return found


@pytest.fixture(scope="module")
def evaluations() -> list[dict[str, Any]]:
    return run_distributed(_evaluations, 2)


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], list[np.ndarray]]:
    """Loss and outputs of each micro-batch, without pipeline or token slices."""
    model = Reference(SETUP.num_blocks, tied=True)
    found = []
    with torch.no_grad():
        for tokens, labels in _held_out():
            logits = model(tokens)
            found.append((models.loss_fn(logits, labels).item(), as_numpy(logits)))
    return tuple(zip(*found, strict=True))


def test_mean_reaches_every_stage(evaluations, expected) -> None:
    for found in evaluations:
        assert found["mean"] == pytest.approx(np.mean(expected[0]), rel=1e-6)


def test_without_reduction_every_micro_batch_has_its_loss(evaluations, expected) -> None:
    first, last = evaluations
    assert first["by micro-batch"] is None
    assert [float(loss) for loss in last["by micro-batch"]] == pytest.approx(expected[0], rel=1e-6)


def test_loss_can_stay_on_the_last_stage(evaluations) -> None:
    first, last = evaluations
    assert first["loss of the last stage"] is None
    assert last["loss of the last stage"] == last["mean"]
