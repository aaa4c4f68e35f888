"""The weights of a rank, and what its optimizer keeps of them, by the names of the parameters."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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
