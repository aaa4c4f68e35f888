"""Groups of trials differ by more than noise: each has constants of its own, close to those of its cluster.

Trials of one group (a model, a number of devices, a day) share what the formulas miss of them. So their errors are not
independent, and hundreds of them say less of the next group than their number suggests. A hierarchical model says so
(Gelman et al., Bayesian Data Analysis, 3rd edition, chapters 5 and 15):

    e_g = J_g (x + d_g) + o_g + noise
    x ~ N(0, W^2)        d_g ~ N(0, omega^2 W^2)        o_g ~ N(0, tau^2)        noise ~ N(0, s^2)

with the errors e_g of the trials of group g, their slopes J_g in the logarithms x of the constants, and the widths W of
the prior; o_g is what no constant explains and all trials of a group share, such as a day's clocks. With d_g and o_g
integrated out, errors of a group have the covariance

    R_g = s^2 I + tau^2 1 1' + omega^2 J_g W^2 J_g'

and the logarithms of the constants, given all groups, have the covariance A^-1, A = W^-2 + sum_g J_g' R_g^-1 J_g.
Constants of a group that nobody has measured have A^-1 + omega^2 W^2: however many trials there are of others, a
prediction that depends on constants in another way than those stays unsure. Few groups pull constants less far from
their defaults than as many trials of many groups: they are shrunk (Efron and Morris, JASA 70, 1975).

What the fit would have said of a group that it had not seen, it says without being run again. For linear models this
is exact; with V = J_g A^-1 J_g',

    r(-g) = (I - V R_g^-1)^-1 r_g        V(-g) = V + V (R_g - V)^-1 V
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHARES = (0.1, 0.2, 0.4)
"""How far constants of one group may be from those of its cluster, in widths of the prior: omega."""

OFFSETS = (0.01, 0.03, 0.06)
"""Standard deviations that errors common to a group may have: tau."""

USUAL_SHARE, USUAL_OFFSET, DECADES = 0.2, 0.03, 0.3
"""Omega and tau before any trial was seen, and the standard deviation of their decimal logarithms: few groups say
little of them."""


class Unseen(NamedTuple):
    """Predictions of each group by a fit that has not seen it."""

    errors: Floats
    """[n] log(predicted / measured)."""
    variances: Floats
    """[n] that the fit expects of them."""


class GroupEffects:
    """Groups that trials fall into, and how far their constants are from each other's.

    Args:
        groups: of each of n trials.
    """

    def __init__(self, groups: Sequence[object], share: float = USUAL_SHARE, offset: float = USUAL_OFFSET) -> None:
        places: dict[object, list[int]] = {}
        for index, group in enumerate(groups):
            places.setdefault(group, []).append(index)
        self._groups, self.share, self.offset = groups, share, offset
        self._rows = [np.array(rows) for rows in places.values()]

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._rows)

    def some(self, which: NDArray[np.bool_]) -> "GroupEffects":
        """Return the groups of some of the trials.

        Args:
            which: [n] whether a trial is one of them.
        """
        chosen = [group for group, used in zip(self._groups, which, strict=True) if used]
        return GroupEffects(chosen, self.share, self.offset)

    def _covariances(self, slopes: Floats, variances: Floats, widths: Floats) -> list[Floats]:
        """R_g of each group."""
        shifted = slopes * (self.share * widths)
        return [np.diag(variances[rows]) + self.offset**2 + shifted[rows] @ shifted[rows].T for rows in self._rows]

    def whitening(self, slopes: Floats, variances: Floats, widths: Floats) -> Floats:
        """Matrix [n, n] that makes the errors independent of each other, with variance 1.

        Args:
            slopes: [n, p] of the trials.
            variances: [n] s^2, larger where a trial counts less.
            widths: [p] standard deviations of the prior.
        """
        matrix = np.zeros((len(slopes), len(slopes)))
        for rows, covariance in zip(self._rows, self._covariances(slopes, variances, widths), strict=True):
            matrix[np.ix_(rows, rows)] = np.linalg.inv(np.linalg.cholesky(covariance))
        return matrix

    def precision(self, slopes: Floats, variances: Floats, widths: Floats) -> Floats:
        """A [p, p], the inverse of the covariance of the logarithms of the constants.

        Args:
            slopes: [n, p] of the trials.
            variances: [n] s^2.
            widths: [p] standard deviations of the prior.
        """
        precision = np.diag(widths**-2.0)
        for rows, covariance in zip(self._rows, self._covariances(slopes, variances, widths), strict=True):
            precision += slopes[rows].T @ np.linalg.solve(covariance, slopes[rows])
        return precision

    def log_evidence(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> float:
        """Logarithm of the probability of the errors before any constant was fitted, up to what always stays the same.

        Args:
            errors: [n] with the constants of the prior.
            slopes: [n, p] of the trials.
            variances: [n] s^2.
            widths: [p] standard deviations of the prior.
        """
        # Of S = R + J W^2 J', by the matrix determinant lemma and Woodbury's identity.
        precision, pulled, found = np.diag(widths**-2.0), np.zeros(len(widths)), 0.0
        for rows, covariance in zip(self._rows, self._covariances(slopes, variances, widths), strict=True):
            solved = np.linalg.solve(covariance, np.column_stack([slopes[rows], errors[rows]]))
            precision += slopes[rows].T @ solved[:, :-1]
            pulled += slopes[rows].T @ solved[:, -1]
            found += errors[rows] @ solved[:, -1] + np.linalg.slogdet(covariance)[1]
        found += np.linalg.slogdet(precision)[1] - pulled @ np.linalg.solve(precision, pulled)
        return -0.5 * float(found)

    def most_probable(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> "GroupEffects":
        """Return the same groups with the omega and tau that explain their errors best (empirical Bayes).

        Args:
            errors: [n] with the constants of the prior.
            slopes: [n, p] of the trials.
            variances: [n] s^2.
            widths: [p] standard deviations of the prior.
        """

        def score(groups: "GroupEffects") -> float:
            off = np.log10([groups.share / USUAL_SHARE, groups.offset / USUAL_OFFSET]) / DECADES
            return groups.log_evidence(errors, slopes, variances, widths) - 0.5 * float(off @ off)

        return max((GroupEffects(self._groups, *each) for each in product(SHARES, OFFSETS)), key=score)

    def unseen(self, errors: Floats, slopes: Floats, variances: Floats, widths: Floats) -> Unseen:
        """Return what the fit would say of each trial, had it not seen its group.

        Args:
            errors: [n] of the fit of all.
            slopes: [n, p] of the trials.
            variances: [n] s^2.
            widths: [p] standard deviations of the prior.
        """
        known = np.linalg.inv(self.precision(slopes, variances, widths))
        found, expected = np.empty(len(errors)), np.empty(len(errors))
        for rows, covariance in zip(self._rows, self._covariances(slopes, variances, widths), strict=True):
            explained = slopes[rows] @ known @ slopes[rows].T
            left = covariance - explained
            # (I - V R^-1)^-1 = R (R - V)^-1
            found[rows] = covariance @ np.linalg.solve(left, errors[rows])
            expected[rows] = np.diag(explained + explained @ np.linalg.solve(left, explained))
        return Unseen(found, expected + (slopes**2) @ (self.share * widths) ** 2 + self.offset**2)
