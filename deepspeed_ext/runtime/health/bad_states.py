"""Weights and optimizer states of a rank by the names of the parameters, and those that are NaN or infinite."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

WEIGHT, MASTER = "weight", "fp32 weight"
"""Kinds of a state: the weight that layers use, and the one that DeepSpeed's optimizers step. Others are moments, such
as `exp_avg`."""


class State(NamedTuple):
    """A tensor that outlives a step."""

    name: str
    parameter: nn.Parameter
    kind: str
    """`weight`, `fp32 weight`, or the name of a moment."""
    values: Tensor
    """[elements] or in the shape of the parameter; a view, not a copy."""

    def __str__(self) -> str:
        """Text for messages: `weight 2.mlp.up.weight`, `exp_avg of 2.mlp.up.weight`."""
        return f"{self.kind} {self.name}" if self.kind in (WEIGHT, MASTER) else f"{self.kind} of {self.name}"


def states_of(engine: Any) -> Iterator[State]:
    """The states of a rank, parameter by parameter, as they are when nothing is under way."""
    engine.complete_weights()
    optimizer = engine.optimizer
    in_fragments = not isinstance(optimizer, torch.optim.Optimizer)
    for name, parameter in engine.module.named_parameters():
        yield State(name, parameter, WEIGHT, parameter.detach())
        kept = _fragments(optimizer, parameter) if in_fragments else _moments(optimizer.state.get(parameter, {}))
        for kind, values in kept:
            yield State(name, parameter, kind, values.detach())


def _moments(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of floating point among what an optimizer of torch keeps; the count of steps is none of them."""
    for key, value in state.items():
        if torch.is_tensor(value) and value.is_floating_point() and value.dim() > 0:
            yield key, value


def _fragments(optimizer: Any, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """This rank's fragments of a parameter in DeepSpeed's flat groups."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return
    yield MASTER, mapping.hp_fragment
    inner, address = optimizer.optimizer, mapping.get_hp_fragment_address()
    flat = inner.param_groups[mapping.param_group_index]["params"][0]
    for key, value in _moments(inner.state.get(flat, {})):
        yield key, value.narrow(0, address.start, address.numel)


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
