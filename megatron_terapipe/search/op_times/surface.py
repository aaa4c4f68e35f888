"""Seconds of one op as a function of its micro-batch and token slice, through measured points.

Between points the times follow the terms that an op has,

    fixed + linear R + quadratic B positions + prefix B before        R = B (end - start) rows of B sequences

with the positions that tokens attend to (`config.model.attended_positions`) and the tokens in reach before the token
slice, whose coefficients, none below zero, are fitted to all points. Few points do not tell all terms apart: one is met
by any term alone. Then only the first terms of `PREFERRED` that they tell apart are fitted, so a single point says that
times grow with the rows, not that they are fixed (ADR 61). What the points differ from the fit by is a factor, and the
logarithm of that factor is interpolated: over the start of the token slice, then over its length, then over the
micro-batch, each time by how far the logarithm of the fit has come from one point to the next. So the surface goes
through the points, and where they grow from one to the next, so does it between them; beyond the last point the factor
stays what it was.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config.model.attended_positions import attended_positions, positions_in_reach
from megatron_terapipe.search.op_times.layer_times import Numbers, ScalarOrArray

Whole = NDArray[np.int64]

PREFERRED = (1, 0, 2, 3)
"""Columns of `terms`, fitted where points tell them from those before: most of the time of an op goes into its rows."""

TINY_S = 1e-9
"""Seconds below which an op takes no time: logarithms need a floor."""


class Point(NamedTuple):
    """One measured op."""

    micro_batch_size: int
    """Sequences."""
    start: int
    """First token of the token slice."""
    end: int
    """Token behind its last."""
    seconds: float
    """Time that it took."""


def terms(
    micro_batch_size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, window: int | None = None
) -> tuple[ScalarOrArray, ...]:
    """Terms of an op without their coefficients; arguments broadcast.

    Args:
        start: first token of the token slice.
        end: token behind its last one.
        window: tokens that a token attends to, itself included; None for all before it.
    """
    begin, stop = np.asarray(start), np.asarray(end)
    rows = np.multiply(micro_batch_size, stop - begin)
    positions = micro_batch_size * attended_positions(begin, stop, window)
    before = micro_batch_size * (positions_in_reach(begin, stop, window) - (stop - begin))
    return np.ones_like(rows, dtype=float), rows, positions, before


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The points of one micro-batch size: their lengths, and for each its starts and factors."""

    lengths: Numbers
    starts: tuple[Numbers, ...]
    log_factors: tuple[Numbers, ...]


@dataclass(frozen=True, slots=True)
class Surface:
    """Times of one op; see above."""

    coefficients: Numbers
    """[4] of the fitted terms."""
    sizes: Numbers
    """[M] micro-batch sizes that were measured."""
    by_size: tuple[_Lengths, ...]
    """What was measured of each."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""

    @classmethod
    def through(cls, points: Sequence[Point], window: int | None = None) -> "Surface":
        """Fit a surface through points.

        A point that took longer than one that is larger in every way is noise: both are moved to their mean first.

        Args:
            window: tokens that a token attends to, itself included; None for all before it.
        """
        seconds = np.maximum(np.array([point.seconds for point in points], dtype=float), TINY_S)
        sizes, starts, ends = (np.array([point[axis] for point in points]) for axis in range(3))
        seconds = _growing(sizes, starts, ends - starts, seconds)
        coefficients = _fit(np.stack(terms(sizes, starts, ends, window), axis=1), seconds)
        log_factors = np.log(seconds / _fitted(coefficients, sizes, starts, ends, window=window))
        found = []
        for size in np.unique(sizes):
            lengths = np.unique((ends - starts)[sizes == size])
            rows = [np.flatnonzero((sizes == size) & (ends - starts == length)) for length in lengths]
            rows = [row[np.argsort(starts[row])] for row in rows]
            found.append(
                _Lengths(
                    lengths.astype(float),
                    tuple(starts[row].astype(float) for row in rows),
                    tuple(log_factors[row] for row in rows),
                )
            )
        return cls(coefficients, np.unique(sizes).astype(float), tuple(found), window)

    def __call__(
        self, micro_batch_size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, *, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        """Seconds; arguments broadcast.

        Args:
            start: first token of the token slice.
            parts: into how many equal parts all but the fixed time is cut, for more ranks than were measured.
        """
        size, begin, stop = np.broadcast_arrays(*(np.asarray(each, float) for each in (micro_batch_size, start, end)))
        by_size = [
            self._log_factor(each, held, begin, stop) for each, held in zip(self.sizes, self.by_size, strict=True)
        ]
        log_factor = _between(self.sizes, size, np.stack(by_size), lambda each: self._fitted(each, begin, stop))
        return self._fitted(size, begin, stop, parts) * np.exp(log_factor)

    def _fitted(
        self, size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        return _fitted(self.coefficients, size, start, end, parts, window=self.window)

    def _log_factor(self, size: float, held: _Lengths, start: Numbers, end: Numbers) -> Numbers:
        """Logarithm of measured over fitted time, for micro-batches of a measured size."""
        length = end - start

        def fitted(length: ScalarOrArray) -> Numbers:
            return self._fitted(size, start, start + length)

        of_lengths = [
            np.interp(np.log(fitted(each)), np.log(self._fitted(size, known, known + each)), factors)
            if len(known) > 1
            else np.full(length.shape, factors[0])
            for each, known, factors in zip(held.lengths, held.starts, held.log_factors, strict=True)
        ]
        return _between(held.lengths, length, np.stack(of_lengths), fitted)


def _between(knots: Numbers, wanted: Numbers, values: Numbers, fitted: Callable[[ScalarOrArray], Numbers]) -> Numbers:
    """Interpolate `values` [K, ...], given at `knots` [K], by the logarithm of what is fitted there."""
    above = np.clip(np.searchsorted(knots, wanted), 0, len(knots) - 1)
    below = np.where(knots[above] <= wanted, above, np.maximum(above - 1, 0))
    low, high = np.log(fitted(knots[below])), np.log(fitted(knots[above]))
    here = np.log(fitted(np.clip(wanted, knots[0], knots[-1])))
    # Where the fit does not grow at all, by the logarithm of the size itself.
    flat = high - low < 1e-12
    log_low, log_high = np.log(knots[below]), np.log(knots[above])
    by_size = np.divide(
        np.log(np.clip(wanted, knots[0], knots[-1])) - log_low,
        log_high - log_low,
        out=np.zeros_like(here),
        where=log_high > log_low,
    )
    by_fit = np.divide(here - low, high - low, out=np.zeros_like(here), where=~flat)
    weight = np.where(flat, by_size, by_fit)
    first = np.take_along_axis(values, below[None], 0)[0]
    second = np.take_along_axis(values, above[None], 0)[0]
    return cast(Numbers, first + weight * (second - first))


def _fitted(
    coefficients: Numbers,
    size: ScalarOrArray,
    start: ScalarOrArray,
    end: ScalarOrArray,
    parts: ScalarOrArray = 1.0,
    *,
    window: int | None = None,
) -> Numbers:
    fixed, *others = map(np.multiply, coefficients, terms(size, start, end, window))
    return cast(Numbers, np.maximum(fixed + sum(others) / parts, TINY_S))


def _fit(features: NDArray[np.float64], seconds: Numbers) -> Numbers:
    """Coefficients, none below zero, that make relative errors small."""
    from scipy.optimize import nnls

    relative = features / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), TINY_S)
    relative = relative / scale
    columns = _told_apart(relative)
    found: Numbers = np.zeros(len(scale))
    found[columns] = nnls(relative[:, columns], np.ones(len(seconds)))[0] / scale[columns]
    return found


def _told_apart(features: NDArray[np.float64]) -> list[int]:
    """Columns of features [n, 4] that no others before them in the order of preference add up to."""
    chosen: list[int] = []
    for column in PREFERRED:
        if np.linalg.matrix_rank(features[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
    return chosen


def _growing(sizes: Whole, starts: Whole, lengths: Whole, seconds: Numbers) -> Numbers:
    """Times that never fall where a token slice begins later, is longer, or has more sequences."""
    from scipy.optimize import isotonic_regression

    logs = np.log(seconds)
    axes = [(sizes, lengths, starts), (sizes, starts, lengths), (starts, lengths, sizes)]
    for *same, along in axes:
        lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index in range(len(logs)):
            lines[tuple(int(axis[index]) for axis in same)].append(index)
        for line in lines.values():
            order = sorted(line, key=lambda index: int(along[index]))
            logs[order] = isotonic_regression(logs[order]).x
    return np.exp(logs)
