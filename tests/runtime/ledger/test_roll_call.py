"""Questions to all ranks, and the one conclusion of all."""

from unittest.mock import ANY

import torch.distributed as dist

from deepspeed_ext.runtime.health.stall import Position, RollCall


def at(rank: int) -> Position:
    return Position(rank=rank, batch="train step 7", done=0, total=0, doing="saving", collectives={"all ranks#0": 3})


def test_all_ranks_hear_the_question_the_answers_and_the_first_conclusion() -> None:
    store = dist.HashStore()
    first, second = RollCall(store, 0), RollCall(store, 1)
    assert not second.is_asked()
    first.ask()
    assert first.is_asked() and second.is_asked()
    for rank, each in enumerate((first, second)):
        each.answer(at(rank))
    assert first.answers() == second.answers() == {0: at(0), 1: at(1)}
    assert not first.has_verdict()
    assert second.settle("rank 0 is behind") == ("rank 0 is behind", True)
    assert first.has_verdict() and first.settle(None) == ("rank 0 is behind", False)
    assert [first.count_heard(1), second.count_heard(1), first.count_heard()] == [1, 2, 2]


def test_a_question_that_was_dealt_with_is_not_asked_again() -> None:
    store = dist.HashStore()
    first, late = RollCall(store, 0), RollCall(store, 1)
    first.ask()
    first.answer(at(0))
    assert first.settle(None) == (None, True)
    first.next()
    assert not first.is_asked()
    # Who comes late answers, and takes over what was concluded.
    late.answer(at(1))
    assert late.settle("rank 0 is behind") == (None, ANY)
    late.next()
    assert not late.is_asked()


def test_a_question_of_1024_ranks_is_answered_in_one_key_of_moderate_size() -> None:
    store = dist.HashStore()
    for rank in range(1024):
        RollCall(store, rank).answer(at(rank))
    assert len(RollCall(store, 0).answers()) == 1024
    assert len(store.get("0/answers")) < 1024 * 512
