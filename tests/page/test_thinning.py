"""Curves that are thinned keep what matters of them."""

from math import inf, nan

import pytest

from megatron_terapipe.page.chart import MOST_BINS, thinned


def test_few_points_stay_as_they_are() -> None:
    points = [(float(x), x**0.5) for x in range(MOST_BINS)]
    assert [(each.x, each.least, each.mean, each.most) for each in thinned(points)] == [(x, y, y, y) for x, y in points]


def test_no_extreme_is_lost() -> None:
    points = [(float(x), 1.0) for x in range(1, 100_001)]
    points[77_776], points[12] = (77_777.0, 50.0), (13.0, -3.0)
    bins = thinned(points)
    assert len(bins) == MOST_BINS
    assert (max(each.most for each in bins), min(each.least for each in bins)) == (50.0, -3.0)
    (spike,) = [each for each in bins if each.most == 50.0]
    assert abs(spike.x - 77_777) < 100_000 / MOST_BINS
    assert sum(each.num_points for each in bins) == 100_000
    assert sum(each.mean * each.num_points for each in bins) == pytest.approx(sum(y for _, y in points), rel=1e-12)


def test_the_first_and_the_last_point_are_in_the_outer_bins() -> None:
    bins = thinned([(float(x), float(x)) for x in range(1000)], most=10)
    assert (bins[0].least, bins[-1].most) == (0.0, 999.0)
    assert [each.num_points for each in bins] == [100] * 10


def test_what_is_no_number_is_left_out() -> None:
    assert [each.x for each in thinned([(1.0, nan), (2.0, 5.0), (3.0, inf)])] == [2.0]
    assert thinned([(1.0, nan)]) == [] == thinned([])
