"""After a batch that was refused at its start another one may follow; not after one that ended in its middle."""

from typing import Any

import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

CUT = (9, 1, 14)


SHORT = [(tokens[:, :20], labels[:, :20]) for tokens, labels in models.batches(2, 2)]
SETUPS = {
    1: [Setup(cut=CUT)],
    2: [Setup(pp=2, cut=CUT), Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2)],
}


def _train(setup: Setup, first: list[Any]) -> tuple[list[str], float | None]:
    """Try a batch, an evaluation of it, and then a good one: the errors, and the last loss."""
    engine = build(setup)
    lines = []
    for call in (engine.train_batch, engine.eval_batch):
        try:
            call(iter(first))
            lines.append("")
        except UserError as error:
            lines.append(str(error))
    try:
        return lines, engine.train_batch(feed(engine, setup)).item()
    except UserError as error:
        return [*lines, str(error)], None


def _good(setup: Setup) -> float:
    engine = build(setup)
    return engine.train_batch(feed(engine, setup)).item()


def _retried(setup: Setup) -> float:
    engine = build(setup)
    try:
        return engine.train_batch(iter(SHORT)).item()
    except UserError:
        return engine.train_batch(feed(engine, setup)).item()


def constant_at_first(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts no token of the first token slice."""
    return torch.zeros(()) if logits.shape[1] == CUT[0] else models.loss_fn(logits, labels)


def _constant_loss(setup: Setup) -> str:
    engine = build(setup, loss_fn=constant_at_first)
    with pytest.raises(UserError) as refused:
        engine.train_batch(feed(engine, setup))
    return str(refused.value)


def _all(setups: list[Setup]) -> list[tuple[Any, ...]]:
    if setups[0].pp == 3:
        return [(_good(setup), _retried(setup)) for setup in setups]
    found = [(_good(setup), _train(setup, SHORT), _train(setup, [])) for setup in setups]
    if setups[0].pp == 1:
        found += [_train(setups[0], [*models.batches(1, 2), SHORT[0]]), _constant_loss(setups[0])]
    return found


@pytest.mark.parametrize("world_size", SETUPS)
def test_another_batch_may_follow_one_that_was_refused(world_size: int) -> None:
    for by_setup in run_distributed(_all, world_size, SETUPS[world_size]):
        for expected, (of_short, after_short), (of_none, after_none) in by_setup[: len(SETUPS[world_size])]:
            assert after_short == after_none == expected
            assert all("do not have the 24 tokens" in line for line in of_short)
            assert all("the data iterator ended at micro-batch 0 of a batch of 2" in line for line in of_none)
        if world_size == 1:
            # Not after one that ended in its middle.
            (lines, loss), constant = by_setup[-2:]
            # Without backward of the first token slice, its keys and values would lose the gradients of later ones.
            assert constant.startswith("the loss of token slice 0 depends on no weight") and "\n" not in constant
            assert "do not have the 24 tokens" in lines[0] and loss is None
            for line in lines[1:]:
                assert line.startswith("an earlier batch ended in its middle (UserError: inputs of shape (2, 20)")
                assert "\n" not in line


def test_ranks_that_read_no_data_wait_for_the_batch_that_follows() -> None:
    for ((expected, found),) in run_distributed(_all, 3, [Setup(pp=3, cut=CUT, num_blocks=5)]):
        assert found == expected
