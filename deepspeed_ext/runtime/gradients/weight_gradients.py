"""Deferred weight gradients: the part of a backward that only the optimizer step waits for.

The backward of a matrix product Y = X W^T is two products. The stage before waits for the first, and for the second
nobody does, so a schedule may run it where the rank would idle (zero bubble, arXiv 2401.10241 section 2):

    BI    dX = dY W          at once
    BW    dW += dY^T X       later: dY and X are kept until then, and nothing else of the graph is

An operation that can do so asks the `weight_gradients` of its weight whether products are being deferred, and hands
its second product over if they are. Every `nn.Linear` of an attached module does, and `linear` for weights that layers
multiply with by themselves. Other operations, such as norms and biases, compute everything in BI, which is as correct
and only less apart. Deferred products are computed in the order in which they came, so every weight adds its gradients
up as a whole backward does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["linear"]

Product = Callable[[], None]
"""Adds one product to the gradient of its weight."""


class WeightGradients:
    """Where backwards leave the products that are deferred.

    Example:
        >>> weight_gradients = WeightGradients()
        >>> weight_gradients.attach(module)                 # doctest: +SKIP
        >>> loss = module(inputs)                           # doctest: +SKIP
        >>> with weight_gradients.deferring() as deferred:      # doctest: +SKIP
        ...     loss.backward()
        >>> compute(deferred)                               # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._deferred: list[Product] | None = None

    @property
    def collecting(self) -> bool:
        """Whether the backward that runs now defers products."""
        return self._deferred is not None

    def attach(self, module: nn.Module) -> None:
        """Let the weights of a module be asked, and its linear layers ask them.

        Each weight gets this object as its `weight_gradients`. A linear layer with another `forward` than that of
        `nn.Linear` keeps it, and computes its products at once.
        """
        for parameter in module.parameters():
            parameter.weight_gradients = self
        for layer in module.modules():
            if getattr(layer.forward, "__func__", None) is nn.Linear.forward:
                layer.forward = partial(_forward, layer)

    @contextmanager
    def deferring(self) -> Iterator[list[Product]]:
        """Around a backward: products go to the list that this yields, instead of being computed."""
        assert self._deferred is None, "one backward at a time"
        self._deferred = deferred = []
        try:
            yield deferred
        finally:
            self._deferred = None

    def add(self, product: Product) -> None:
        """Defer a product; only while `collecting`."""
        assert self._deferred is not None, "nobody is there to compute it"
        self._deferred.append(product)


def compute(deferred: list[Product]) -> None:
    """Compute deferred products in their order, and free each product's tensors at once: the list is empty then."""
    deferred.reverse()
    with torch.no_grad():
        while deferred:
            deferred.pop()()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose product of the weight can be deferred, and adds up in place where the weight says so.

    Any model may call it. Weights that no engine has attached, and such as are computed, are left to torch.

    Args:
        inputs: [..., in].
        weight: [out, in].
        bias: [out].

    Returns:
        [..., out].
    """
    if not _asks(inputs, weight):
        return F.linear(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """The `forward` of linear layers that are attached."""
    return linear(input, layer.weight, layer.bias)


def _asks(inputs: Tensor, weight: Tensor) -> bool:
    """Whether the backward of a product may ask its weight what to do with its gradient."""
    if getattr(weight, "weight_gradients", None) is None or not torch.is_grad_enabled():
        return False
    # Autocast computes the product from copies of another type, whose gradients torch knows how to convert.
    autocast = torch.is_autocast_enabled(inputs.device.type)
    return weight.is_leaf and weight.requires_grad and weight.dim() == 2 and inputs.dim() > 1 and not autocast


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward is the same two products as torch's own."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        # Where a forward is repeated, autograd gives back a copy of the weight that nobody asks for gradients.
        ctx.parameter = weight
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (inputs, weight), parameter = ctx.saved_tensors, ctx.parameter
        rows = output_gradient.flatten(0, -2)
        of_inputs = output_gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        inputs = inputs.flatten(0, -2)
        if _is_watched(parameter):
            return of_inputs, rows.t() @ inputs, of_bias
        store = parameter.weight_gradients
        if store.collecting:
            store.add(lambda: _add(parameter, rows, inputs))
            return of_inputs, None, of_bias
        return of_inputs, _weight_gradient(parameter, rows, inputs), of_bias


def _is_watched(parameter: Tensor) -> bool:
    """Whether somebody asked to be called for each of its gradients, which only autograd does."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _weight_gradient(parameter: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
    """The product, or None once it is added to where the gradient of the weight adds up."""
    accumulated = getattr(parameter, "accumulated_gradient", None)
    if accumulated is None:
        return rows.t() @ inputs
    accumulated.add_product(rows, inputs)
    return None


def _add(parameter: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the product as autograd does: the first is kept as it is."""
    gradient = _weight_gradient(parameter, rows, inputs)
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
