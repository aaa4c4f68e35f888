"""Layers of each stage, where layers differ: two shortest paths over the layers at which stages begin."""

import numpy as np

from deepspeed_ext.plan.simulate.arrays import Numbers, compiled

ROUNDING = 1e-12
"""Relative difference below which two sums of the same numbers in another order count as equal."""


@compiled
def bounds_of_runs(before: Numbers) -> Numbers:
    """Return the bounds of stages, [stages + 1], with the least longest stage, and then with the least sum.

    Args:
        before: [stages, layers + 1] seconds of all layers before each, as each stage would take for them.
    """
    num_stages, ends = before.shape
    # Longest of the first stages up to each layer, and then their sum; every stage has a layer.
    longest, total = np.full((num_stages + 1, ends), np.inf), np.full((num_stages + 1, ends), np.inf)
    begin = np.zeros((num_stages + 1, ends), np.int64)
    longest[0, 0] = total[0, 0] = 0.0
    for stage in range(num_stages):
        for end in range(1, ends):
            for start in range(end):
                run = before[stage, end] - before[stage, start]
                longest[stage + 1, end] = min(longest[stage + 1, end], max(longest[stage, start], run))
    limit = longest[num_stages, ends - 1] * (1 + ROUNDING)
    for stage in range(num_stages):
        for end in range(1, ends):
            for start in range(end):
                run = before[stage, end] - before[stage, start]
                if run <= limit and total[stage, start] + run < total[stage + 1, end]:
                    total[stage + 1, end], begin[stage + 1, end] = total[stage, start] + run, start
    bounds = np.full(num_stages + 1, ends - 1)
    for stage in range(num_stages, 0, -1):
        bounds[stage - 1] = begin[stage, bounds[stage]]
    return bounds
