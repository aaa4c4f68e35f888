"""Positions of ranks, roll calls, and the line that names the rank that blocks the run."""

from typing import Any
from unittest.mock import ANY

import pytest
import torch.distributed as dist

from deepspeed_ext.runtime.health.stall import Position, RollCall, explain, explain_silent_store


def saving(rank: int) -> Position:
    return Position(rank=rank, batch="train step 7", done=0, total=0, doing="saving", collectives={"all ranks#0": 3})


def test_all_ranks_read_the_question_the_answers_and_the_first_conclusion() -> None:
    store = dist.HashStore()
    first, second = RollCall(store, 0), RollCall(store, 1)
    assert not second.is_open()
    first.start()
    assert first.is_open() and second.is_open()
    for rank, each in enumerate((first, second)):
        each.answer(saving(rank))
    assert first.answers() == second.answers() == {0: saving(0), 1: saving(1)}
    assert not first.has_verdict()
    assert second.settle("rank 0 blocks the run") == ("rank 0 blocks the run", True)
    assert first.has_verdict() and first.settle(None) == ("rank 0 blocks the run", False)
    assert [first.count_adopted(1), second.count_adopted(1), first.count_adopted()] == [1, 2, 2]


def test_a_closed_question_is_not_open_again() -> None:
    store = dist.HashStore()
    first, late = RollCall(store, 0), RollCall(store, 1)
    first.start()
    first.answer(saving(0))
    assert first.settle(None) == (None, True)
    first.next()
    assert not first.is_open()
    # A late rank answers, and adopts the conclusion.
    late.answer(saving(1))
    assert late.settle("rank 0 blocks the run") == (None, ANY)
    late.next()
    assert not late.is_open()


def test_a_question_of_1024_ranks_is_answered_in_one_key_of_moderate_size() -> None:
    store = dist.HashStore()
    for rank in range(1024):
        RollCall(store, rank).answer(saving(rank))
    assert len(RollCall(store, 0).answers()) == 1024
    assert len(store.get("0/answers")) < 1024 * 512


LIMIT_S = 60.0
OP = "forward 1F0.2 @0"


def at(rank: int, waits_for: int | None = None, **more: Any) -> Position:
    """A rank in the middle of its program, which does not proceed."""
    facts = {"batch": "train step 7", "done": 4, "total": 20, "doing": OP, "seconds": 61.2, "phase": 12}
    return Position(rank=rank, waits_for=waits_for, **(facts | more))


def in_phase(rank: int, doing: str = "sums over replicas", **more: Any) -> Position:
    return at(rank, doing=doing, **({"done": 20} | more))


def line(*positions: Position, silent: tuple[int, ...] = ()) -> str | None:
    return explain({each.rank: each for each in positions} | dict.fromkeys(silent), LIMIT_S)


def test_the_rank_at_the_end_of_the_chain_blocks() -> None:
    assert line(at(0, 1), at(1, 2), at(2), at(3, 2)) == (
        "rank 2 blocks the run: rank 2 is at 'forward 1F0.2 @0' since 61 s (train step 7, instruction 5 of 20); "
        "rank 0 is at 'forward 1F0.2 @0' since 61 s, waiting for rank 1 (train step 7, instruction 5 of 20), "
        "and so do ranks 1, 3"
    )


def test_blocking_ranks_are_named_with_their_hosts() -> None:
    positions = {0: at(0, 1), 1: at(1), 2: None, 3: None}
    hosts = {1: "node-a", 2: "node-b"}
    found = explain(positions, LIMIT_S, lambda ranks: {rank: hosts[rank] for rank in ranks if rank in hosts})
    assert found is not None and found.startswith("ranks 2 (host node-b), 3 block the run: they give no sign of life")
    del positions[2], positions[3]
    found = explain(positions, LIMIT_S, lambda ranks: hosts)
    assert found is not None and found.startswith("rank 1 (host node-a) blocks the run: rank 1 is at")


def shared(count: int) -> dict[str, Any]:
    return {"collectives": {"tensor-parallel ranks#a": count}}


def replica(first: int | None = None, last: int | None = None) -> dict[str, Any]:
    """Collectives of a rank in the groups of replicas of two stages."""
    counts = {"replicas#a": first, "replicas#b": last}
    return {"collectives": {name: count for name, count in counts.items() if count is not None}}


AT = "rank {0} blocks the run: rank {0} is at 'forward 1F0.2 @0' since {1} s".format
SILENT = "rank 1 blocks the run: it gives no sign of life; rank 0 is at 'forward 1F0.2 @0' since 61 s, "
MANY = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more block the run: they give no sign of life; rank 0 is"
CIRCLE = "ranks 0, 1 wait for each other; rank 0 is at"
IN_COLLECTIVE = "ranks 0, 1 are in the same collective, and it does not end"
BARRIER = {rank: in_phase(rank, "saving", collectives={"all ranks#0": 5 - (rank == 700)}) for rank in range(1024)}
STALLED: dict[str, tuple[list[Position], tuple[int, ...], str, str]] = {
    "one that does not answer": ([at(0, 1), at(2, 1)], (1,), SILENT, ", and so does rank 2"),
    "several that do not answer": ([at(0, 1)], tuple(range(1, 12)), MANY, ""),
    "one between batches": (
        [at(0, 1), at(1, doing="")], (), "rank 1 blocks the run: rank 1 is between batches since", "",
    ),
    # Rank 2 waits for a transfer of rank 0, which waits for its tensor-parallel rank 1, in the middle of an op.
    "one with fewer collectives": (
        [at(0, **shared(41)), at(1, **shared(40)), at(2, 0, collectives={"b": 30}), at(3, 1, collectives={"b": 30})],
        (), AT(1, 61), ", for a collective of the tensor-parallel ranks, and so do ranks 2, 3",
    ),
    # Replicas are ranks 0 and 2, and 1 and 3. Rank 3 computes for ever; rank 2 waits for its gradient.
    "one in the pipeline of another replica": (
        [in_phase(0, **replica(7)), in_phase(1, **replica(last=7)), at(2, 3, **replica(6)), at(3, **replica(last=6))],
        (), "rank 3 blocks the run", "",
    ),
    # Rank 0 has started sums of layers over replicas, and waits for the gradient of the layers before.
    "a transfer counts more than sums that were started ahead": (
        [
            *(at(0, 1, **replica(9)), at(1, **replica(last=5))),
            *(at(2, 3, seconds=2.0, **replica(5)), at(3, seconds=1.0, **replica(last=5))),
        ],
        (), "rank 1 blocks the run", "",
    ),
    "the last at a barrier": (
        list(BARRIER.values()), (), "rank 700 blocks the run: rank 700 is at 'saving' since 61 s",
        "and so do ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1014 more",
    ),
    # Both hosts ran ahead and started all sums; the accelerator of rank 1 is in an op that does not end.
    "an accelerator that has not come to the phase": (
        [in_phase(0, phase=14, **replica(7)), at(1, phase=13, **replica(7))], (), "rank 1 blocks the run", "",
    ),
    "one that proceeds does not wait": (
        [at(0, 1), at(1, seconds=1.0, **replica(9)), at(2, seconds=1.0, **replica(8))], (), AT(1, 1), "",
    ),
    "a circle of transfers": (
        [at(0, 1), at(1, 0)], (), CIRCLE,
        "a connection between them is broken, or this is a defect of the engine",
    ),
    "a collective that does not end": (
        [in_phase(rank, in_collective=True, collectives={"all ranks#0": 3}) for rank in (0, 1)], (), IN_COLLECTIVE, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("positions", "silent", "begins", "ends"), STALLED.values(), ids=STALLED)
def test_the_blocking_rank_is_named(positions: list[Position], silent: tuple[int, ...], begins: str, ends: str) -> None:
    found = line(*positions, silent=silent)
    assert found is not None and found.startswith(begins) and found.endswith(ends)


ALIKE = {"done": 20, "seconds": 3000.0, "collectives": {"all ranks#0": 3}}
PROCEEDING: dict[str, tuple[list[Position], tuple[int, ...]]] = {
    **{  # They compile, evaluate, or write a checkpoint; none waits for another.
        f"all take long: {doing}": ([at(rank, doing=doing, **ALIKE) for rank in (0, 1)], ())
        for doing in ("building the engine", "saving", "norm, clipping and update", OP)
    },
    "one is silent while all others move": ([at(0, seconds=3.0)], (1,)),
    "before the limit": ([at(0, 1, seconds=59.0), at(1, seconds=59.0)], ()),
    "collectives before the limit": ([in_phase(0, seconds=59.0, **replica(2)), in_phase(1, **replica(1))], ()),
    "one is no longer in the collective": (
        [in_phase(0, in_collective=True, **shared(3)), in_phase(1, **shared(3))], (),
    ),
    # Rank 1 has not answered, but not for long.
    "one has not answered yet": ([at(0, 1)], ()),
    "one for which several wait has not answered yet": ([at(0, 1), at(2, 0)], ()),
}  # fmt: skip


@pytest.mark.parametrize(("positions", "silent"), PROCEEDING.values(), ids=PROCEEDING)
def test_no_rank_blocks(positions: list[Position], silent: tuple[int, ...]) -> None:
    assert line(*positions, silent=silent) is None


def test_text_of_a_position() -> None:
    assert str(at(0, 1, code="executor.py:88 _read")) == (
        "rank 0 is at 'forward 1F0.2 @0' since 61 s, waiting for rank 1, in executor.py:88 _read "
        "(train step 7, instruction 5 of 20)"
    )


def test_a_silent_store_is_named() -> None:
    assert explain_silent_store(at(1, 0), 58.0).startswith(
        "rank 0 blocks the run: its host serves the store where the ranks met, which has not answered for 58 s; "
        "rank 1 is at 'forward 1F0.2 @0'"
    )
