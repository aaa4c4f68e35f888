"""Which rank all others wait for, from what each says of itself."""

from deepspeed_ext.runtime.ledger.stall import Position, explain, explain_alone


def at(rank: int, waits_for: int | None, doing: str = "forward 1F0.2 @0") -> Position:
    return Position(rank=rank, batch="train step 7", done=4, total=20, doing=doing, waits_for=waits_for, seconds=61.2)


def test_the_rank_at_the_end_of_the_chain_is_behind():
    positions = {0: at(0, 1), 1: at(1, 2), 2: at(2, None), 3: at(3, 2)}
    assert explain(positions, 0) == (
        "rank 2 is behind: rank 2 is at 'forward 1F0.2 @0' since 61 s (train step 7, instruction 5 of 20); "
        "waiting: ranks 0, 1, 3"
    )


def test_a_rank_that_does_not_answer_is_behind():
    positions = {0: at(0, 1), 1: None, 2: at(2, 1)}
    assert explain(positions, 2) == "rank 1 is behind: it gives no sign of life; waiting: ranks 0, 2"


def test_a_rank_between_batches_is_behind():
    positions = {0: at(0, 1), 1: at(1, None, doing="")}
    assert explain(positions, 0) == (
        "rank 1 is behind: rank 1 is between batches since 61 s (train step 7); waiting: rank 0"
    )


def test_a_circle_is_named_as_our_fault():
    assert explain({0: at(0, 1), 1: at(1, 0)}, 0).startswith("ranks 0, 1 wait for each other in a circle")


def test_a_position_says_whom_it_waits_for():
    assert str(at(0, 1)) == (
        "rank 0 is at 'forward 1F0.2 @0' since 61 s, waiting for rank 1 (train step 7, instruction 5 of 20)"
    )


def test_a_rank_that_can_ask_nobody_says_what_it_knows():
    assert explain_alone(at(1, 0)).startswith(
        "rank 0 is behind: it gives no sign of life; waiting: rank 1 is at 'forward"
    )
    assert explain_alone(at(2, 1)).endswith("the store at which the ranks met, which rank 0 keeps, does not answer")
