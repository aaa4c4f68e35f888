import numpy as np
import pytest

from megatron_terapipe.search.learn import scores

INFINITE = float("inf")


def group(measured: list[float], predicted: list[float]) -> scores.Group:
    return np.array(measured), np.array(predicted)


def test_errors() -> None:
    measured, predicted = group([1, 2, INFINITE], [1.1, 1.8, 9])
    assert scores.relative_errors(measured, predicted) == pytest.approx([0.1, -0.1])
    assert scores.mean([]) is None and scores.mean([1.0, None]) == 1.0


def test_rank_correlation() -> None:
    assert scores.spearman(group([1, 2, 3, 4], [10, 20, 30, 40])) == pytest.approx(1)
    assert scores.spearman(group([1, 2, 3, 4], [4, 3, 2, 1])) == pytest.approx(-1)
    # Without ties it is 1 - 6 sum d^2 / (n (n^2 - 1)).
    assert scores.spearman(group([1, 2, 3, 4, 5], [1, 3, 2, 5, 4])) == pytest.approx(1 - 6 * 4 / (5 * 24))
    # A failed run is the slowest there is.
    assert scores.spearman(group([1, 2, 3, INFINITE], [1, 2, 3, 4])) == pytest.approx(1)
    assert scores.spearman(group([1, 2, 3], [1, 2, 3])) is None
    assert scores.spearman(group([1, 2, 3, 4], [7, 7, 7, 7])) is None


def test_ties_share_a_rank() -> None:
    # Ranks .5 .5 2 3 4 and 2 .5 .5 3.5 3.5, both of mean 2: sums of products 6.75, of squares 9.5 and 9.
    assert scores.spearman(group([1, 1, 2, 3, 5], [2, 1, 1, 4, 4])) == pytest.approx(6.75 / 85.5**0.5)


def test_pairs() -> None:
    # 1.00 and 1.03 are too close; of the other two pairs one is in order.
    assert scores.pair_accuracy([group([1.0, 1.03, 2.0], [1.5, 3.0, 2.0])], 0.05) == (2, pytest.approx(1.0 / 2))
    assert scores.pair_accuracy([group([1.0, 1.03, 2.0], [1.5, 3.0, 2.0])], 0.0) == (3, pytest.approx(2.0 / 3))
    assert scores.pair_accuracy([group([1.0, 2.0], [1.0, 1.0])], 0.05) == (1, pytest.approx(0.5 / 1))
    # Of two failed runs nobody knows the order; either is slower than one that did not fail.
    assert scores.pair_accuracy([group([1.0, INFINITE, INFINITE], [1.0, 2.0, 0.5])], 0.05) == (
        2,
        pytest.approx(1.0 / 2),
    )
    assert scores.pair_accuracy([group([1, 2], [1, 2]), group([1, 2], [2, 1])], 0.05) == (2, 0.5)
    assert scores.pair_accuracy([], 0.05) == (0, None)


def test_regret() -> None:
    assert scores.top1_regret(group([1.0, 1.2, 2.0], [5.0, 4.0, 6.0])) == pytest.approx(0.2)
    assert scores.top1_regret(group([1.0, 1.2], [4.0, 4.0])) == pytest.approx(0.1)  # either, by chance
    assert scores.top1_regret(group([1.0, 1.5, INFINITE], [5.0, 6.0, 4.0])) == pytest.approx(0.5)
    assert scores.top1_regret(group([1.0], [1.0])) is None
