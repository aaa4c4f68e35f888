"""The inner loops of TeraPipe's joint program, compiled. Importing this file imports numba."""

import numpy as np

from deepspeed_ext.plan.optimise.kernel import kernel
from deepspeed_ext.plan.optimise.problem import Numbers


@kernel
def shortest_cut(
    times: Numbers,
    forward: Numbers,
    backward: Numbers,
    most_forward: float,
    most_backward: float,
    any_number: bool,
    begins: Numbers,
) -> float:
    """Shortest sum of times over the cuts of a sequence, none of whose token slices is above a limit.

    Args:
        times: [points, points] time of the token slice from a point to a later one.
        forward: [points, points] what the first limit is for; infinite = no such token slice.
        backward: [points, points] the same for the second.
        most_forward: first limit.
        most_backward: second limit.
        any_number: whether any number of token slices is allowed, or as many as there are rows.
        begins: [rows, points] becomes the point where the token slice that ends at each point begins; one row for any
            number of them.

    Returns:
        The sum; infinite if there is no such cut.
    """
    rows, size = begins.shape
    reached = np.full(size, np.inf)
    reached[0] = 0.0
    for row in range(rows):
        # Any number of token slices go on from points that this very row reached.
        further = reached if any_number else np.full(size, np.inf)
        for start in range(size - 1):
            if not np.isfinite(reached[start]):
                continue
            for end in range(start + 1, size):
                if forward[start, end] <= most_forward and backward[start, end] <= most_backward:
                    total = reached[start] + times[start, end]
                    if total < further[end]:
                        further[end] = total
                        begins[row, end] = start
        reached = further
    return float(reached[size - 1])
