"""Joins input and weight gradients that stand next to each other into whole backwards, where that costs no time.

A whole backward keeps fewer tensors alive and starts fewer kernels, but gives its input gradient only at its end. The
stage before may have time to wait for it.
"""

import numpy as np

from deepspeed_ext.plan.optimise.problem import BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Numbers, Problem
from deepspeed_ext.plan.optimise.replay import Orders, replay

SLACK = 1e-12
"""Rounding of makespans, relative."""
PLAYED_OPS, FEWEST_REPLAYS = 20e6, 100
"""Ops that all tries play together, about a second of one core; what has not been tried by then stays in two parts."""


def merged(problem: Problem, orders: Orders) -> Orders:
    """The same orders with as many whole backwards as keep the makespan.

    Neighbours are tried by the block: those of a rank at once, then either half of a block that would cost time. So
    the number of replays is small where there is much time or none. Costs that do not tell weight gradients apart have
    no other backwards than whole ones.
    """
    per_kind = problem.shape.num_stages * problem.num_units
    rows = orders.to_list()
    pairs = [_pairs(row, per_kind) for row in rows]
    if not problem.is_split:
        return Orders.of([_joined(row, positions, per_kind) for row, positions in zip(rows, pairs, strict=True)])
    longest = replay(problem, orders) * (1 + SLACK)
    replays_left = max(int(PLAYED_OPS / problem.num_ops), FEWEST_REPLAYS)
    for rank, positions in enumerate(pairs):
        accepted = np.zeros(0, np.int64)
        blocks = [positions]
        while blocks and replays_left > 0:
            block = blocks.pop()
            if not len(block):
                continue
            replays_left -= 1
            candidate = np.concatenate([accepted, block])
            trial = [*rows[:rank], _joined(rows[rank], candidate, per_kind), *rows[rank + 1 :]]
            if replay(problem, Orders.of(trial)) <= longest:
                accepted = candidate
            elif len(block) > 1:
                blocks += [block[len(block) // 2 :], block[: len(block) // 2]]
        rows[rank] = _joined(rows[rank], accepted, per_kind)
    return Orders.of(rows)


def _pairs(row: Numbers, per_kind: int) -> Numbers:
    """Positions of input gradients whose weight gradient is next."""
    kind, place = row // per_kind, row % per_kind
    next_to = (kind[:-1] == INPUT_GRADIENT) & (kind[1:] == WEIGHT_GRADIENT) & (place[:-1] == place[1:])
    return np.flatnonzero(next_to)


def _joined(row: Numbers, positions: Numbers, per_kind: int) -> Numbers:
    """A row with whole backwards at these positions."""
    joined = row.copy()
    joined[positions] += (BACKWARD - INPUT_GRADIENT) * per_kind
    return np.delete(joined, positions + 1)
