"""After a batch that was refused before it began the engine goes on; after one that ended in its middle it says so."""

from typing import Any

import pytest

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
    """Try a batch, an evaluation of it, and then a good one: what was said, and the loss of the last."""
    engine = build(setup)
    said = []
    for call in (engine.train_batch, engine.eval_batch):
        try:
            call(iter(first))
            said.append("")
        except UserError as error:
            said.append(str(error))
    try:
        return said, engine.train_batch(feed(engine, setup)).item()
    except UserError as error:
        return [*said, str(error)], None


def _good(setup: Setup) -> float:
    engine = build(setup)
    return engine.train_batch(feed(engine, setup)).item()


def _all(setups: list[Setup]) -> list[tuple[float, Any, Any]]:
    return [(_good(setup), _train(setup, SHORT), _train(setup, [])) for setup in setups]


@pytest.mark.parametrize("world_size", SETUPS)
def test_another_batch_may_follow_one_that_was_refused(world_size: int) -> None:
    for by_setup in run_distributed(_all, world_size, SETUPS[world_size]):
        for expected, (of_short, after_short), (of_none, after_none) in by_setup:
            assert after_short == after_none == expected
            assert all("do not have the 24 tokens" in line for line in of_short)
            assert all("the data iterator ended at micro-batch 0 of a batch of 2" in line for line in of_none)


def _good_and_retried(setup: Setup) -> tuple[float, float]:
    expected, engine = _good(setup), build(setup)
    try:
        return expected, engine.train_batch(iter(SHORT)).item()
    except UserError:
        return expected, engine.train_batch(feed(engine, setup)).item()


def test_ranks_that_read_no_data_wait_for_the_batch_that_follows() -> None:
    for expected, found in run_distributed(_good_and_retried, 3, Setup(pp=3, cut=CUT, num_blocks=5)):
        assert found == expected


def test_a_batch_that_ended_in_its_middle_is_the_last_one() -> None:
    ((said, loss),) = run_distributed(_train, 1, Setup(cut=CUT), [*models.batches(1, 2), SHORT[0]])
    assert "do not have the 24 tokens" in said[0]
    for line in said[1:]:
        assert line.startswith("an earlier batch ended in its middle (UserError: inputs of shape (2, 20)")
        assert "\n" not in line
    assert loss is None
