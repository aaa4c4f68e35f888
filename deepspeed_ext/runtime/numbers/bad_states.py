"""Weights and optimizer states that are no numbers: NaN or infinite."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.runtime.numbers.states import MASTER, WEIGHT, State, states_of

_NAMED = 3
"""States that a message names; more are counted."""


class BadState(NamedTuple):
    """A state of a rank that has bad numbers."""

    rank: int
    state: str
    count: int
    size: int

    def __str__(self) -> str:
        """Text for messages."""
        return f"{self.state} on rank {self.rank} ({self.count} of {self.size} numbers)"


def bad_states(engine: Any) -> list[BadState]:
    """States of all ranks that have a NaN or an infinity, moments first; every rank must ask.

    One pass over the states without a copy; the host waits once.
    """
    mine = [
        BadState(engine.global_rank, str(state), _num_bad(state.values), state.values.numel())
        for state in not_finite(states_of(engine))
    ]
    any_bad = torch.tensor(len(mine), device=engine.device)
    dist.all_reduce(any_bad, op=dist.ReduceOp.MAX)
    if not any_bad.item():
        return []
    gathered: list[list[BadState]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found = [bad for of_rank in gathered for bad in of_rank]
    # A bad moment spoils the weight that it steps. A bad weight spoils nothing, since its gradient is not stepped on.
    return sorted(found, key=lambda bad: bad.state.startswith((WEIGHT, MASTER)))


def not_finite(states: Iterable[State]) -> list[State]:
    """Those of some states that have a NaN or an infinity."""
    by_dtype: dict[torch.dtype, list[State]] = defaultdict(list)
    for state in states:
        if state.values.numel():
            by_dtype[state.values.dtype].append(state)
    found = []
    for of_one_dtype in by_dtype.values():
        finite = are_finite([state.values for state in of_one_dtype]).tolist()
        found += [state for state, is_finite in zip(of_one_dtype, finite, strict=True) if not is_finite]
    return found


def are_finite(tensors: list[Tensor]) -> Tensor:
    """Whether each tensor has nothing but numbers: [tensors], on their device.

    Args:
        tensors: of one dtype, none of them empty.
    """
    # The largest magnitude is never rounded, so a large number is not taken for an infinity.
    return torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite()


def described(found: list[BadState]) -> str:
    """Bad states in words: the first few, and how many more."""
    more = len(found) - _NAMED
    return ", ".join(map(str, found[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _num_bad(values: Tensor) -> int:
    return int(values.numel() - torch.isfinite(values).sum())
