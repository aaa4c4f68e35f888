"""The exact stage partition against plain enumeration."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.layout import StagePartition
from examples.amp.partition import StageTimes, solve, stage_times
from examples.amp.search import times_with_cuts
from megatron_terapipe.errors import ConfigError


def enumerated(layers, num_stages, num_micro_batches, cuts, blocking, allowed):
    """The best objective over all ways to deal the layers, written down from its definition."""
    num_layers = layers.shape[1]
    best = np.inf
    for inner in combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *inner, num_layers)
        runs = list(pairwise(bounds))
        if allowed is not None and not all(allowed[stage, i, j] for stage, (i, j) in enumerate(runs)):
            continue
        times = [layers[stage % len(layers), i:j].sum() for stage, (i, j) in enumerate(runs)]
        crossings = [cuts[stage, bound] for stage, bound in enumerate(inner)]
        periods = list(times)
        for stage, crossing in enumerate(crossings if blocking else []):
            periods[stage] += crossing
            periods[stage + 1] += crossing
        best = min(best, (num_micro_batches - 1) * max(periods) + sum(times) + sum(crossings))
    return best


def objective(partition: StagePartition, layers, num_micro_batches, cuts, blocking):
    """The cost of the returned partition."""
    allowed = np.zeros((partition.num_stages, *[layers.shape[1] + 1] * 2), dtype=bool)
    for stage in range(partition.num_stages):
        allowed[stage, partition.bounds[stage], partition.bounds[stage + 1]] = True
    return enumerated(layers, partition.num_stages, num_micro_batches, cuts, blocking, allowed)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_partition_is_better(data):
    num_layers = data.draw(st.integers(1, 10))
    num_stages = data.draw(st.integers(1, num_layers))
    num_micro_batches = data.draw(st.sampled_from([1, 2, 3, 8]))
    blocking = data.draw(st.booleans())
    # Few distinct values: ties and steps are where such a search goes wrong.
    seed = data.draw(st.integers(0, 10**6))
    values = np.random.default_rng(seed)
    devices = data.draw(st.sampled_from([1, num_stages]))
    shape = max(num_stages - 1, 1), num_layers + 1
    if data.draw(st.booleans()):
        layers = values.integers(0, 9, (devices, num_layers)) * 1.0
        cuts = values.integers(0, data.draw(st.sampled_from([1, 6])), shape) * 1.0
    else:
        # Devices and cuts differ so much that a looser threshold buys a much smaller sum: the best lies in between.
        layers = values.random((devices, 1)) * values.random((devices, num_layers)) ** 2
        cuts = 3 * values.random(shape) ** 4
    allowed = None
    if data.draw(st.booleans()):
        allowed = values.random((num_stages, num_layers + 1, num_layers + 1)) < 0.8
    least = enumerated(layers, num_stages, num_micro_batches, cuts, blocking, allowed)

    def solved():
        times = times_with_cuts(layers, num_stages, cuts, blocking=blocking)
        if allowed is not None:
            times = StageTimes(*(np.where(allowed, each, np.inf) for each in (times.period_s, times.fill_s)))
        return solve(times, num_micro_batches)

    if not np.isfinite(least):
        with pytest.raises(ConfigError, match="within memory"):
            solved()
        return
    found, objective_s = solved()
    assert objective_s == pytest.approx(least)
    assert objective(found, layers, num_micro_batches, cuts, blocking) == pytest.approx(least)
    if allowed is not None:
        bounds = found.bounds
        assert all(allowed[stage, bounds[stage], bounds[stage + 1]] for stage in range(num_stages))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="3 layers on 4 stages: give between 1 and 3"):
        stage_times(np.ones(3), 4)
