"""Evaluation between training batches: any micro-batch size and count, all outputs, and no effect on training."""

from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.live_batch import Batch
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import Reference
from tests.runtime.training import ROWS, Setup, as_numpy, build, feed

CUT = (9, 1, 8, 6)
SETUP = Setup(pp=2, cut=CUT)
EVAL_ROWS, EVAL_MICRO_BATCHES = 5, 3


def _held_out() -> Any:
    return iter(models.batches(EVAL_MICRO_BATCHES, EVAL_ROWS, seed=7))


def _gentle(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def held(batch: Batch) -> int:
    """Number of tensors of a batch, or lists of them."""
    states = batch.parts, batch.documents, batch.states, batch.buffers, batch.passed
    return sum(map(len, (*states, batch.losses, batch.outputs, batch.labels)))


def _evaluations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = build(SETUP, optimizer=_gentle)
    sizes = {"num_micro_batches": EVAL_MICRO_BATCHES, "micro_batch_size": EVAL_ROWS}
    found["mean"] = engine.eval_batch(_held_out(), **sizes).item()
    found["by micro-batch"] = engine.eval_batch(_held_out(), reduce_output=None, **sizes)
    loss, outputs = engine.eval_batch(_held_out(), return_logits=True, **sizes)
    found["mean with outputs"] = loss.item()
    found["outputs"] = outputs and [as_numpy(tensor) for tensor in outputs]
    found["only outputs"] = engine.eval_batch(_held_out(), return_logits=True, compute_loss=False, **sizes)[1]
    found["loss of the last stage"] = engine.eval_batch(_held_out(), bcast_loss=False, **sizes)
    found["as when training"] = engine.eval_batch(feed(engine, SETUP)).item()
    with pytest.raises(UserError, match="reduce_output='sum'"):
        engine.eval_batch(_held_out(), reduce_output="sum")
    found["held"] = held(engine._executor.batch)
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
        assert found["mean"] == found["mean with outputs"] == pytest.approx(np.mean(expected[0]), rel=1e-6)


def test_without_reduction_every_micro_batch_has_its_loss(evaluations, expected) -> None:
    first, last = evaluations
    assert first["by micro-batch"] is None
    assert [float(loss) for loss in last["by micro-batch"]] == pytest.approx(expected[0], rel=1e-6)


def test_outputs_are_those_of_all_micro_batches_and_all_tokens(evaluations, expected) -> None:
    first, last = evaluations
    for name in ("outputs", "only outputs"):
        assert first[name] is None
        assert len(last[name]) == EVAL_MICRO_BATCHES
        for outputs, whole in zip(last[name], expected[1], strict=True):
            assert outputs.shape == (EVAL_ROWS, models.SEQ, models.VOCAB)
            assert np.linalg.norm(outputs - whole) <= 1e-6 * np.linalg.norm(whole)


def test_loss_can_stay_on_the_last_stage(evaluations) -> None:
    first, last = evaluations
    assert first["loss of the last stage"] is None
    assert last["loss of the last stage"] == last["mean"]


def test_sizes_default_to_those_of_training(evaluations) -> None:
    model = Reference(SETUP.num_blocks, tied=True)
    batches = models.batches(SETUP.micro_batches, ROWS, seed=0)
    with torch.no_grad():
        mean = np.mean([models.loss_fn(model(tokens), labels).item() for tokens, labels in batches])
    for found in evaluations:
        assert found["as when training"] == pytest.approx(mean, rel=1e-6)


def test_nothing_is_held_after_an_evaluation(evaluations) -> None:
    assert [found["held"] for found in evaluations] == [0, 0]
