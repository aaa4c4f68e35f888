"""After a batch that was refused before it began the engine goes on; after one that ended in its middle it says so."""

from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

CUT = (9, 1, 14)


def _train(setup: Setup, first: list[Any]) -> dict[str, Any]:
    """Try a batch, an evaluation of it, and then a good one."""
    engine = build(setup)
    said = []
    for call in (engine.train_batch, engine.eval_batch):
        try:
            call(iter(first))
            said.append("")
        except UserError as error:
            said.append(str(error))
    try:
        return {"said": said, "loss": engine.train_batch(feed(engine, setup)).item()}
    except UserError as error:
        return {"said": [*said, str(error)], "loss": None}


def _good(setup: Setup) -> float:
    engine = build(setup)
    return engine.train_batch(feed(engine, setup)).item()


SHORT = [(tokens[:, :20], labels[:, :20]) for tokens, labels in models.batches(2, 2)]
SETUPS = [Setup(cut=CUT), Setup(pp=2, cut=CUT), Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2)]


@pytest.mark.parametrize("first", [SHORT, []], ids=["short", "none"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_another_batch_may_follow_one_that_was_refused(setup: Setup, first: list[Any]) -> None:
    expected = run_distributed(_good, setup.world_size, setup)
    found = run_distributed(_train, setup.world_size, setup, first)
    assert [each["loss"] for each in found] == expected
    reason = "do not have the 24 tokens" if first else "the data iterator ended at micro-batch 0 of a batch of 2"
    for each in found:
        assert all(reason in line for line in each["said"])


def test_ranks_that_read_no_data_wait_for_the_batch_that_follows() -> None:
    setup = Setup(pp=3, cut=CUT, num_blocks=5)
    expected = run_distributed(_good, 3, setup)
    assert [each for each in run_distributed(_retry, 3, setup)] == expected


def _retry(setup: Setup) -> float:
    engine = build(setup)
    try:
        return engine.train_batch(iter(SHORT)).item()
    except UserError:
        return engine.train_batch(feed(engine, setup)).item()


def test_a_batch_that_ended_in_its_middle_is_the_last_one() -> None:
    setup = Setup(cut=CUT)
    (found,) = run_distributed(_train, 1, setup, [*models.batches(1, 2), SHORT[0]])
    assert "do not have the 24 tokens" in found["said"][0]
    for line in found["said"][1:]:
        assert line.startswith("a batch before ended in its middle (UserError: inputs of shape (2, 20)")
        assert "\n" not in line
    assert found["loss"] is None
