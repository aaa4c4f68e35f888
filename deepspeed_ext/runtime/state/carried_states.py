"""States that layers carry from token slice to token slice, and their gradients, which go back the same way.

A convolution, a linear attention or a state-space layer reads a state h that the token slice before left, and leaves
one. Each token slice has a graph of its own, in which the state that it read is a leaf; so the chain rule across token
slices has one backward per token slice, last to first, as keys and values have:

    forward     h0 ->[ 0 ]-> h1 ->[ 1 ]-> h2 ->[ 2 ]         h1 and h2 are values: the next graph starts from them
    backward         [ 0 ]<- dh1 -[ 1 ]<- dh2 -[ 2 ]         dh2, the gradient of the leaf in 2, starts the graph of 1
                                                             together with the gradients of its outputs

The gradients of the states that a token slice left are complete when its backward runs, since only the token slice
after it reads them. Nothing travels between ranks, and no graph is kept for longer than without a state.

A layer that is computed again reads the same values. In a stage without a graph of the forward they are kept as its
input is; its second forward leaves the same states, of which only the graph is used.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from deepspeed_ext.plan.errors import UserError

StateName = tuple[int, str]
"""Layer, and the name of one of its states."""


@dataclass(slots=True)
class _Left:
    """A state as a token slice left it."""

    value: Tensor
    version: int
    """Changes in place of the value so far."""
    has_graph: bool = False
    """Whether a forward with a graph has left it, which shows whether it depends on a weight or an input."""
    edge: GradientEdge | None = None
    """The place in the graph of its token slice from which its gradient flows back; None for no gradient."""
    leaf: Tensor | None = None
    """The value as the token slice after reads it."""


@dataclass(slots=True)
class CarriedStates:
    """States of the layers of one stage in one micro-batch."""

    last_token_slice: int
    forward_only: bool = False
    """Whether no backward follows, so that only the last state is kept."""
    bears_gradients: bool | None = None
    """Whether the stage has gradients, once it is computed again; None before."""
    _left: dict[int, dict[StateName, _Left]] = field(default_factory=lambda: defaultdict(dict))
    """By token slice."""
    _first_backward: int | None = None
    """The first token slice whose backward has begun."""

    def read(self, name: StateName, token_slice: int, initial: Tensor) -> Tensor:
        """Return the state [...] that the token slice before left; in the first one, `initial`.

        Raises:
            UserError: none was left, or one of another shape, type or device, or it was changed in place.
        """
        if token_slice == 0:
            return initial
        layer, of_layer = name
        left = self._left[token_slice - 1].get(name)
        if left is None:
            raise UserError(
                f"layer {layer} reads the state {of_layer!r}, and its forward of token slice {token_slice - 1} left "
                f"none: call past.carry({of_layer!r}, state) in every forward"
            )
        if _form(left.value) != _form(initial):
            raise UserError(
                f"layer {layer} left the state {of_layer!r} as {_form(left.value)}, and its initial value is "
                f"{_form(initial)}: give both one shape, type and device"
            )
        if left.value._version != left.version:
            raise UserError(
                f"the state {of_layer!r} of layer {layer} was changed in place after past.carry: change a copy"
            )
        if not torch.is_grad_enabled():
            return left.value
        if left.leaf is None:
            bears = left.edge is not None if left.has_graph else bool(self.bears_gradients)
            left.leaf = left.value.detach().requires_grad_(bears and left.value.is_floating_point())
        return left.leaf

    def leave(self, name: StateName, token_slice: int, state: Tensor) -> None:
        """Keep the state [...] of a layer for the token slice after.

        Raises:
            UserError: the layer is computed again, and left none the first time, or one of another form.
        """
        # In a backward, torch computes layers again within the graph that they belong to.
        begun = self._first_backward is not None and token_slice >= self._first_backward
        if token_slice == self.last_token_slice or begun:
            return
        left = self._left[token_slice].get(name)
        if left is None and self.bears_gradients is not None:
            raise _differs(name, "left none", f"leaves {_form(state)}")
        if left is None:
            value = state.detach()
            if value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone()  # A part of a tensor would keep all of it.
            left = self._left[token_slice][name] = _Left(value, value._version)
            if self.forward_only:
                self._left[token_slice - 1].pop(name, None)
        if _form(left.value) != _form(state):
            raise _differs(name, f"left {_form(left.value)}", f"leaves {_form(state)}")
        if torch.is_grad_enabled() and not left.has_graph:
            left.has_graph = True
            left.edge = get_gradient_edge(state) if state.requires_grad else None

    def roots(self, token_slice: int) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Yield the states that a token slice left, as roots of its backward, each with its gradient [...].

        The token slice after must have run its backward. States that no later backward needs are freed.
        """
        self._first_backward = token_slice
        for name, left in self._left.pop(token_slice, {}).items():
            if not left.has_graph and left.value.is_floating_point():
                raise _differs(name, f"left {_form(left.value)}", "leaves none")
            if left.edge is not None and left.leaf is not None and left.leaf.grad is not None:
                yield left.edge, left.leaf.grad


def _form(state: Tensor) -> str:
    return f"{list(state.shape)} {str(state.dtype).removeprefix('torch.')} on {state.device}"


def _differs(name: StateName, first: str, again: str) -> UserError:
    layer, of_layer = name
    return UserError(
        f"layer {layer} {first} as its state {of_layer!r}, and {again} when it is computed again: compute the same in "
        "every forward"
    )
