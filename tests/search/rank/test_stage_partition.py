"""Partitions of layers into stages against plain enumeration."""

from itertools import combinations

import numpy as np
import pytest

from megatron_terapipe.search.rank.stage_partition import balanced_partition
from tests.search.problems import small_problem


def slowest_s(times: np.ndarray, bounds: tuple[int, ...], model_chunks: int) -> float:
    """Seconds of the slowest rank; the layer before the dealt ones is on the first, those after them on the last."""
    ranks = len(times)
    loads = np.zeros(ranks)
    for stage in range(len(bounds) - 1):
        loads[stage % ranks] += times[stage % ranks, 1 + bounds[stage] : 1 + bounds[stage + 1]].sum()
    loads[0] += times[0, 0]
    loads[-1] += times[-1, bounds[-1] + 1 :].sum()
    return float(loads.max())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("model_chunks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_layers_that_are_alike(ranks: int, model_chunks: int, seed: int) -> None:
    problem = small_problem(num_layers=9)
    rng = np.random.default_rng(seed)
    speeds = rng.uniform(0.5, 2, ranks)
    times = np.outer(speeds, [0.4, *[1.0] * 9, 0.1, rng.uniform(0, 3)])
    found = balanced_partition(problem, times, ranks, model_chunks)
    assert found.num_stages == ranks * model_chunks and found.num_layers == 9
    others = [(0, *cuts, 9) for cuts in combinations(range(1, 9), ranks * model_chunks - 1)]
    best = min(slowest_s(times, bounds, model_chunks) for bounds in others)
    assert slowest_s(times, found.bounds, model_chunks) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_differ(seed: int) -> None:
    problem, rng = small_problem(num_layers=9), np.random.default_rng(seed)
    times = np.outer(rng.uniform(0.5, 2, 3), rng.integers(1, 5, 12))
    found = balanced_partition(problem, times, 3, 1)
    others = [(0, *cuts, 9) for cuts in combinations(range(1, 9), 2)]

    def passing_s(bounds: tuple[int, ...]) -> float:
        """Seconds of all stages, one after the other."""
        return float(sum(times[stage, 1 + bounds[stage] : 1 + bounds[stage + 1]].sum() for stage in range(3)))

    best = min((round(slowest_s(times, bounds, 1), 9), round(passing_s(bounds), 9)) for bounds in others)
    assert (slowest_s(times, found.bounds, 1), passing_s(found.bounds)) == pytest.approx(best)
