"""Which copies of a state differ, by their hashes."""

from deepspeed_ext.runtime.health.consistency import REPLICAS, compared, described


def test_equal_copies_do_not_differ() -> None:
    assert compared("weight 1.bias", REPLICAS, [0, 2, 4], [7, 7, 7]) is None


def test_the_copy_that_differs_from_most_is_named() -> None:
    found = compared("weight 1.bias", REPLICAS, [0, 2, 4], [7, 7, 9])
    assert found is not None
    assert (found.odd, found.others) == ((4,), (0, 2))
    assert str(found) == "weight 1.bias on rank 4 differs from that on ranks 0, 2 (replicas)"


def test_where_no_copy_has_a_majority_all_are_named() -> None:
    for hashed in ([7, 9], [7, 7, 9, 9]):
        ranks = list(range(len(hashed)))
        found = compared("weight 1.bias", REPLICAS, ranks, hashed)
        assert found is not None and found.odd == tuple(ranks) and found.others == ()
    assert str(found) == "weight 1.bias on ranks 0, 1, 2, 3 differs (replicas)"


def test_a_message_names_the_first_few_and_counts_the_rest() -> None:
    found = [compared(f"weight {number}", REPLICAS, [0, 1], [1, 2]) for number in range(5)]
    assert described([each for each in found if each]).endswith("weight 2 on ranks 0, 1 differs (replicas); and 2 more")
