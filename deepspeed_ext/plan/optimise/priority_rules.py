"""Rules: seven numbers that give every op a priority, so that a search has few numbers to choose instead of an order.

A rule pictures a steady state. A period T is the time that the busiest rank needs for one micro-batch. Every op has a
wished time, which is its priority:

    F  of token slice j of micro-batch k on stage i    T (k + forward_spread j / S + forward_depth d(i))
    BI of the same                                     T (turn + k + backward_spread (S - 1 - j) / S
                                                              + backward_depth (1 - d(i)))
    BW                                                 that of its BI, T * weight_delay later

with d(i) from 0 at the first stage to 1 behind the last, as forwards take time. With `forward_spread` near 1 the token
slices of a micro-batch enter one by one between backwards, near 0 together; `turn` says how many micro-batches are
let in before the first backward is urgent; the depths say which model chunk goes first; `weight_delay` keeps weight
gradients back to fill gaps. `patience` is for how long a rank may wait for a more urgent op, in periods.

1f1b and zero-bubble orders, V-shaped ones and all between are rules, or close to one.
"""

from dataclasses import dataclass

import numpy as np

from deepspeed_ext.plan.optimise.problem import Numbers, SchedulingProblem

AT_ONCE = -1e300
"""Priority of a weight gradient that must stay with its input gradient."""


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """Seven numbers that order all ops; what they mean is said above."""

    forward_spread: float
    forward_depth: float
    turn: float
    backward_spread: float
    backward_depth: float
    weight_delay: float
    patience: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> "PriorityRule":
        """Any rule that may be good."""
        return cls(
            forward_spread=random.uniform(0, 1.2),
            forward_depth=random.uniform(0, 1.5),
            turn=random.uniform(0, 2),
            backward_spread=random.uniform(0, 1.2),
            backward_depth=random.uniform(0, 1.5),
            weight_delay=float(random.choice([0, 0.1, 0.3, 1])),
            patience=float(random.choice([0, 0.01, 0.02])),
        )

    def varied(self, random: np.random.Generator) -> "PriorityRule":
        """A rule nearby: some of the numbers changed, by a little or by more."""
        step = 10 ** random.uniform(-3, -0.5)
        changes = random.normal(size=6) * step * (random.random(6) < 0.5)
        patience = self.patience + (random.random() < 0.3) * random.normal() * 0.01
        return PriorityRule(
            self.forward_spread + changes[0],
            self.forward_depth + changes[1],
            self.turn + changes[2],
            self.backward_spread + changes[3],
            self.backward_depth + changes[4],
            self.weight_delay + changes[5],
            abs(patience),
        )


class Priorities:
    """Turns rules into priorities for one problem."""

    def __init__(self, problem: SchedulingProblem) -> None:
        shape = problem.shape
        self.period = float(problem.work.max()) / shape.num_micro_batches
        unit = np.arange(problem.num_units)
        self._micro_batch = unit // shape.num_token_slices
        self._token_slice = unit % shape.num_token_slices / shape.num_token_slices
        self._turned_back = 1 - 1 / shape.num_token_slices - self._token_slice
        forward = problem.tables.times[0].sum(axis=1)
        before = np.cumsum(forward) - forward
        self._depth = (before / max(forward.sum(), 1e-300))[:, None]
        self._is_split = problem.is_split

    def of(self, rule: PriorityRule) -> Numbers:
        """[3, N, units] priorities."""
        forward = self._micro_batch + rule.forward_spread * self._token_slice + rule.forward_depth * self._depth
        backward = self._micro_batch + rule.backward_spread * self._turned_back
        backward = backward + rule.turn + rule.backward_depth * (1 - self._depth)
        weight = backward + rule.weight_delay if self._is_split else np.full_like(backward, AT_ONCE)
        return np.stack([forward, backward, weight]) * self.period

    def patience(self, rule: PriorityRule) -> float:
        """How long a rank waits, as a time."""
        return rule.patience * self.period
