"""Groups with constants of their own: what a fit says of one that it has not seen."""

import numpy as np
import pytest

from megatron_terapipe.search.learn.fit import OFFSETS, GroupEffects

RANDOM = np.random.default_rng(0)
SLOPES, WIDTHS, SHARE = RANDOM.normal(size=(12, 3)), np.array([0.5, 0.2, 1.0]), 0.3
SD, OFFSET = 0.1, 0.15
OBSERVED = SLOPES @ np.array([0.3, -0.2, 0.1]) + RANDOM.normal(0, SD, 12)
GROUPS = [index // 3 for index in range(12)]
VARIANCES = np.full(12, SD**2) * np.linspace(1, 2, 12)


def solve(rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Constants and their covariance, the groups' own constants written out as more unknowns."""
    unknown = np.zeros((len(rows), 3 * 5 + 4))
    unknown[:, :3] = SLOPES[rows]
    for line, row in enumerate(rows):
        unknown[line, 3 * (1 + GROUPS[row]) : 3 * (2 + GROUPS[row])] = SLOPES[row]
        unknown[line, 3 * 5 + GROUPS[row]] = 1.0
    widths = np.concatenate([WIDTHS, *4 * [SHARE * WIDTHS], 4 * [OFFSET]])
    precision = (unknown.T / VARIANCES[rows]) @ unknown + np.diag(widths**-2)
    covariance = np.linalg.inv(precision)
    return (covariance @ (unknown.T / VARIANCES[rows]) @ OBSERVED[rows])[:3], covariance[:3, :3]


def test_a_group_that_was_not_seen_is_predicted_as_by_another_fit() -> None:
    everything = list(range(12))
    errors = OBSERVED - SLOPES @ solve(everything)[0]
    unseen_errors, variances = GroupEffects(GROUPS, SHARE, OFFSET).unseen(errors, SLOPES, VARIANCES, WIDTHS)
    for group in range(4):
        rows = [index for index in everything if GROUPS[index] == group]
        found, covariance = solve([index for index in everything if GROUPS[index] != group])
        assert unseen_errors[rows] == pytest.approx(OBSERVED[rows] - SLOPES[rows] @ found)
        of_another = covariance + np.diag((SHARE * WIDTHS) ** 2)
        assert variances[rows] == pytest.approx(np.diag(SLOPES[rows] @ of_another @ SLOPES[rows].T) + OFFSET**2)


def test_precision_and_whitening_agree() -> None:
    groups = GroupEffects(GROUPS, SHARE, OFFSET)
    white = groups.whitening(SLOPES, VARIANCES, WIDTHS) @ SLOPES
    precision = groups.precision(SLOPES, VARIANCES, WIDTHS)
    assert white.T @ white + np.diag(WIDTHS**-2) == pytest.approx(precision)
    assert np.linalg.inv(precision) == pytest.approx(solve(list(range(12)))[1])


def test_many_trials_of_one_group_say_less_than_one_trial_of_many() -> None:
    slopes, variances, widths = np.ones((50, 1)), np.full(50, 0.01), np.array([1.0])
    same = GroupEffects(["one"] * 50, SHARE).precision(slopes, variances, widths)
    apart = GroupEffects(list(range(50)), SHARE).precision(slopes, variances, widths)
    assert same[0, 0] < 1 + SHARE**-2 < 0.1 * apart[0, 0]


def test_the_evidence_is_that_of_a_normal_distribution() -> None:
    groups = GroupEffects(GROUPS, SHARE, OFFSET)
    same = np.equal.outer(GROUPS, GROUPS)
    shared = same * (OFFSET**2 + (SLOPES * (SHARE * WIDTHS) ** 2) @ SLOPES.T)
    whole = np.diag(VARIANCES) + shared + (SLOPES * WIDTHS**2) @ SLOPES.T
    expected = -0.5 * (OBSERVED @ np.linalg.solve(whole, OBSERVED) + np.linalg.slogdet(whole)[1])
    # All but the widths of the prior, which stay the same.
    constant = np.sum(np.log(WIDTHS))
    assert groups.log_evidence(OBSERVED, SLOPES, VARIANCES, WIDTHS) == pytest.approx(expected + constant)


def test_groups_that_differ_are_found_to_differ() -> None:
    draw = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 3)
    slopes, noise = np.ones((120, 1)), draw.normal(0, 0.01, 120)
    apart = GroupEffects(groups.tolist()).most_probable(
        noise + 0.1 * draw.normal(size=40)[groups], slopes, np.full(120, 1e-4), np.array([0.01])
    )
    alike = GroupEffects(groups.tolist()).most_probable(noise, slopes, np.full(120, 1e-4), np.array([0.01]))
    assert apart.offset == max(OFFSETS) and alike.offset == min(OFFSETS)
