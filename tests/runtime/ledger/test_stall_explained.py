"""Which rank all others wait for, from what each says of itself."""

from typing import Any

import pytest

from deepspeed_ext.runtime.health.stall import Position, explain, explain_alone

LIMIT_S = 60.0
OP = "forward 1F0.2 @0"


def at(rank: int, waits_for: int | None = None, **more: Any) -> Position:
    """A rank in the middle of its program, which does not move."""
    facts = {"batch": "train step 7", "done": 4, "total": 20, "doing": OP, "seconds": 61.2, "phase": 12}
    return Position(rank=rank, waits_for=waits_for, **(facts | more))


def in_phase(rank: int, doing: str = "sums over replicas", **more: Any) -> Position:
    return at(rank, doing=doing, **({"done": 20} | more))


def line(*positions: Position, silent: tuple[int, ...] = ()) -> str | None:
    return explain({each.rank: each for each in positions} | dict.fromkeys(silent), LIMIT_S)


def test_the_rank_at_the_end_of_the_chain_is_behind() -> None:
    assert line(at(0, 1), at(1, 2), at(2), at(3, 2)) == (
        "rank 2 is behind: rank 2 is at 'forward 1F0.2 @0' since 61 s (train step 7, instruction 5 of 20); "
        "rank 0 is at 'forward 1F0.2 @0' since 61 s, waiting for rank 1 (train step 7, instruction 5 of 20), "
        "and so do ranks 1, 3"
    )


def test_a_rank_that_does_not_answer_is_behind() -> None:
    found = line(at(0, 1), at(2, 1), silent=(1,))
    assert found is not None
    assert found.startswith("rank 1 is behind: it gives no sign of life; rank 0 is at 'forward 1F0.2 @0' since 61 s, ")
    assert found.endswith(", and so does rank 2")


def test_several_that_do_not_answer_are_named_together() -> None:
    found = line(at(0, 1), silent=tuple(range(1, 12)))
    assert found is not None
    assert found.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more are behind: they give no sign of life; rank 0 is")


def test_those_that_are_behind_are_named_with_their_hosts() -> None:
    positions = {0: at(0, 1), 1: at(1), 2: None, 3: None}
    hosts = {1: "node-a", 2: "node-b"}
    found = explain(positions, LIMIT_S, lambda ranks: {rank: hosts[rank] for rank in ranks if rank in hosts})
    assert found is not None and found.startswith("ranks 2 (host node-b), 3 are behind: they give no sign of life")
    del positions[2], positions[3]
    found = explain(positions, LIMIT_S, lambda ranks: hosts)
    assert found is not None and found.startswith("rank 1 (host node-a) is behind: rank 1 is at")


def test_nobody_is_behind_a_rank_that_is_silent_while_all_others_move() -> None:
    assert line(at(0, seconds=3.0), silent=(1,)) is None


def test_a_rank_between_batches_is_behind() -> None:
    found = line(at(0, 1), at(1, doing=""))
    assert found is not None and found.startswith("rank 1 is behind: rank 1 is between batches since 61 s (train step")


def test_of_a_group_the_one_that_has_started_fewer_collectives_is_behind() -> None:
    """Rank 2 waits for a transfer of rank 0, which waits for its tensor-parallel rank 1, in the middle of an op."""
    found = line(
        at(0, collectives={"tensor-parallel ranks#a": 41}),
        at(1, collectives={"tensor-parallel ranks#a": 40}),
        at(2, 0, collectives={"tensor-parallel ranks#b": 30}),
        at(3, 1, collectives={"tensor-parallel ranks#b": 30}),
    )
    assert found is not None and found.startswith("rank 1 is behind: rank 1 is at")
    assert found.endswith(", for a collective of the tensor-parallel ranks, and so do ranks 2, 3")


def test_one_replica_that_waits_for_another_leads_into_its_pipeline() -> None:
    """Replicas are ranks 0 and 2, and 1 and 3. Rank 3 computes for ever; rank 2 waits for its gradient."""
    found = line(
        in_phase(0, collectives={"replicas#a": 7}),
        in_phase(1, collectives={"replicas#b": 7}),
        at(2, 3, collectives={"replicas#a": 6}),
        at(3, collectives={"replicas#b": 6}),
    )
    assert found is not None and found.startswith("rank 3 is behind")


def test_a_transfer_counts_more_than_sums_that_were_started_ahead() -> None:
    """Rank 0 has started sums of layers over replicas, and waits for the gradient of the layers before."""
    found = line(
        at(0, 1, collectives={"replicas#a": 9}),
        at(1, collectives={"replicas#b": 5}),
        at(2, 3, seconds=2.0, collectives={"replicas#a": 5}),
        at(3, seconds=1.0, collectives={"replicas#b": 5}),
    )
    assert found is not None and found.startswith("rank 1 is behind")


def test_the_last_at_a_barrier_is_named_though_many_wait_for_it() -> None:
    counts = dict.fromkeys(range(1024), 5) | {700: 4}
    found = line(*(in_phase(rank, "saving", collectives={"all ranks#0": count}) for rank, count in counts.items()))
    assert found is not None and found.startswith("rank 700 is behind: rank 700 is at 'saving' since 61 s")
    assert found.endswith("and so do ranks 1, 2, 3, 4, 5, 6, 7, 8 and 1014 more")


def test_an_accelerator_that_has_not_come_to_the_phase_is_behind() -> None:
    """Both hosts ran ahead and started all sums; the accelerator of rank 1 is in an op that does not end."""
    found = line(in_phase(0, phase=14, collectives={"replicas#a": 7}), at(1, phase=13, collectives={"replicas#a": 7}))
    assert found is not None and found.startswith("rank 1 is behind")


@pytest.mark.parametrize("doing", ["building the engine", "saving", "norm, clipping and update", OP])
def test_ranks_that_all_take_long_do_not_stand_still(doing: str) -> None:
    """They compile, evaluate, or write a checkpoint; none waits for another."""
    both = [at(rank, doing=doing, done=20, seconds=3000.0, collectives={"all ranks#0": 3}) for rank in (0, 1)]
    assert line(*both) is None


def test_a_rank_that_takes_long_is_not_behind_before_the_limit() -> None:
    assert line(at(0, 1, seconds=59.0), at(1, seconds=59.0)) is None
    assert line(in_phase(0, seconds=59.0, collectives={"a#a": 2}), in_phase(1, collectives={"a#a": 1})) is None


def test_a_rank_that_moves_is_on_its_way_and_waits_for_nobody() -> None:
    found = line(
        at(0, 1),
        at(1, seconds=1.0, collectives={"replicas#a": 9}),
        at(2, seconds=1.0, collectives={"replicas#a": 8}),
    )
    assert found is not None and found.startswith("rank 1 is behind: rank 1 is at 'forward 1F0.2 @0' since 1 s")


def test_a_circle_of_transfers_is_named() -> None:
    found = line(at(0, 1), at(1, 0))
    assert found is not None and found.startswith("ranks 0, 1 wait for each other; rank 0 is at")
    assert "a connection between them carries nothing any more, or this is a fault of ours" in found


def test_a_collective_of_all_that_does_not_end_is_told_from_long_work() -> None:
    stuck = [in_phase(rank, in_collective=True, collectives={"all ranks#0": 3}) for rank in (0, 1)]
    found = line(*stuck)
    assert found is not None and found.startswith("ranks 0, 1 are in the same collective, and it does not end")
    assert line(stuck[0], in_phase(1, collectives={"all ranks#0": 3})) is None


def test_a_rank_of_which_nothing_is_known_yet_is_nobodys_end() -> None:
    """Rank 1 has not answered, but not for long."""
    assert line(at(0, 1)) is None
    assert line(at(0, 1), at(2, 0)) is None


def test_a_position_says_whom_it_waits_for_and_where() -> None:
    assert str(at(0, 1, code="executor.py:88 _read")) == (
        "rank 0 is at 'forward 1F0.2 @0' since 61 s, waiting for rank 1, in executor.py:88 _read "
        "(train step 7, instruction 5 of 20)"
    )


def test_a_rank_that_can_ask_nobody_says_what_it_knows() -> None:
    assert explain_alone(at(1, 0), 58.0).startswith(
        "rank 0 is behind: its host keeps the store at which the ranks met, and that gives no sign of life since 58 s; "
        "rank 1 is at 'forward 1F0.2 @0'"
    )
