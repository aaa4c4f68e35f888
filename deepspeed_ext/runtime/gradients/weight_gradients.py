"""Weight gradients: deferred products, and bf16 weights whose gradients are accumulated in fp32.

The backward of a matrix product Y = X W^T is two products. The previous stage waits for the first, and no op waits for
the second, so a schedule may run it where the rank would idle (zero bubble, arXiv 2401.10241 section 2):

    BI    dX = dY W          at once
    BW    dW += dY^T X       later: of the graph only dY and X are kept until then

Deferred products are computed in their order, so every weight sums its gradients as a whole backward does.

DeepSpeed's `BF16_Optimizer` keeps an fp32 sum for each bf16 weight. It fills them by a pass over all weights of the
stage after each backward: about 20 bytes a parameter, for every token slice.

    DeepSpeed    zero all bf16 gradients | backward | cast all to fp32 | add all
    here         backward: sum += dY^T X, once for each weight        | add the others: norms, biases

An engine gives a weight a sink: the sum of its gradients, and the queue of products. Operations with support for it
ask `sum_of` and `now_or_deferred`: every `nn.Linear` of an attached module, `linear` for other products, and functions
of a model's own. Other operations, such as norms and biases, compute all gradients in BI, and leave a bf16 gradient to
autograd, which `collect` moves to its sum.

Autograd runs once, in BI. Two passes over a retained graph, as in torch's pipelining, would compute shared work twice,
and the gradients of keys and values too. The `forward` of `nn.Linear` is replaced on the instances: a
`TorchFunctionMode` would pass every call of torch through Python.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["linear", "now_or_deferred", "sum_of"]

Product = Callable[[], None]
"""Adds one product to the gradient of its weight."""


class WeightGradients:
    """The products that backwards defer."""

    def __init__(self) -> None:
        self._deferred: list[Product] | None = None

    @property
    def collecting(self) -> bool:
        """Whether the backward that runs now defers products."""
        return self._deferred is not None

    def attach(self, module: nn.Module) -> None:
        """Defer products of all weights of a module, and let its linear layers use their sinks.

        A linear layer with another `forward` than `nn.Linear` keeps it, and computes its products at once.
        """
        for parameter in module.parameters():
            set_queue(parameter, self)
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
        assert self._deferred is not None, "only within `deferring`"
        self._deferred.append(product)


def compute(deferred: list[Product]) -> None:
    """Compute deferred products in their order, and free the tensors of each at once: empties the list."""
    deferred.reverse()
    with torch.no_grad():
        while deferred:
            deferred.pop()()


# ---------------------------------------------------------------------- the sink of a weight


class _Sink:
    """Sum and queue of the gradient of a weight, as an engine sets them; an attribute of the weight."""

    def __init__(self) -> None:
        self.queue: WeightGradients | None = None
        """Takes products while a backward defers them."""
        self.total: AccumulatedGradient | None = None
        """The sum of an optimizer; None for `weight.grad`."""


def _sink(weight: Tensor) -> _Sink:
    """The sink of a weight, given to it at the first call."""
    if not hasattr(weight, "gradient_sink"):
        weight.gradient_sink = _Sink()
    return weight.gradient_sink


def set_queue(weight: Tensor, queue: WeightGradients) -> None:
    """Set the queue that takes products of a weight while a backward defers them."""
    _sink(weight).queue = queue


def set_sum(weight: Tensor, total: "AccumulatedGradient | None") -> None:
    """Set the sum of a weight's gradients; None for `weight.grad`."""
    _sink(weight).total = total


def _sink_in_backward(weight: Tensor) -> _Sink | None:
    """The sink that a backward may use; None for a computed weight, and for hooks, which only autograd calls."""
    watched = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    return None if watched or not weight.is_leaf else getattr(weight, "gradient_sink", _NO_ENGINE)


_NO_ENGINE = _Sink()
"""Sink of weights without an engine."""


def sum_of(weight: Tensor, *, in_place: bool = True) -> "AccumulatedGradient | None":
    """The sum to which a backward adds a gradient of a weight; None for a gradient that it returns to autograd.

    Args:
        in_place: whether to add to the `weight.grad` of a weight without another sum; its first gradient is autograd's.
    """
    sink = _sink_in_backward(weight)
    if sink is None:
        return None
    if sink.total is None and in_place and weight.grad is not None:
        return AccumulatedGradient(weight.grad, weight.dtype)
    return sink.total


def is_deferred(weight: Tensor) -> bool:
    """Whether the backward that runs now defers products of a weight."""
    sink = _sink_in_backward(weight)
    return sink is not None and sink.queue is not None and sink.queue.collecting


def now_or_deferred(weight: Tensor, product: Callable[[], Tensor | None]) -> Tensor | None:
    """Compute a product of a weight, unless its backward defers such products.

    Args:
        product: adds to `sum_of` the weight and returns None, or returns the gradient [...].

    Returns:
        The gradient for autograd; None for none.
    """
    if not is_deferred(weight):
        return product()

    def later() -> None:
        gradient = product()
        if gradient is not None:
            # As autograd: the first one is kept.
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    weight.gradient_sink.queue.add(later)
    return None


# ---------------------------------------------------------------------- linear layers


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a product of the weight that can be deferred, and that adds to the sum of the weight in place.

    Any model may call it. Weights that are not attached to an engine, or are computed, are left to torch.

    Args:
        inputs: [..., in].
        weight: [..., in], a matrix once its first dimensions are taken together.
        bias: [out].
    """
    attached = getattr(weight, "gradient_sink", _NO_ENGINE).queue is not None
    # Autocast computes the product from copies of another type, whose gradients torch converts.
    autocast = torch.is_autocast_enabled(inputs.device.type)
    differentiated = torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad
    if not attached or not differentiated or autocast or weight.dim() < 2 or inputs.dim() == 1:
        return F.linear(inputs, weight.flatten(0, -2) if weight.dim() > 2 else weight, bias)
    return _PlainProduct.apply(inputs, weight, bias)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """The `forward` of attached linear layers."""
    return linear(input, layer.weight, layer.bias)


class _PlainProduct(torch.autograd.Function):
    """`F.linear` with a backward of the same two products as torch's own, and their bits."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        # If a forward is repeated, autograd returns a copy of the weight, which gets no gradient.
        ctx.parameter = weight
        return F.linear(inputs, weight.flatten(0, -2), bias)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        rows = output_gradient.flatten(0, -2)
        of_inputs = output_gradient @ weight.flatten(0, -2) if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        product = partial(_weight_gradient, ctx.parameter, rows, inputs.flatten(0, -2))
        return of_inputs, now_or_deferred(ctx.parameter, product), of_bias


def _weight_gradient(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor | None:
    # Autograd adds gradients to `weight.grad` after their product; in place there would be other bits.
    total = sum_of(weight, in_place=False)
    return (rows.t() @ inputs).view_as(weight) if total is None else total.add_product(rows, inputs)


# ---------------------------------------------------------------------- sums


_SMALL = 1 << 16
"""Elements of a gradient below which the start of an operation takes more time than its bytes."""


class AccumulatedGradient:
    """The sum of one weight's gradients, `total`, from factors of a dtype."""

    def __init__(self, total: Tensor, dtype: torch.dtype) -> None:
        self.total, self._dtype = total, dtype
        # A weight of more than two dimensions multiplies as a matrix.
        self._matrix = total.flatten(0, -2) if total.dim() > 1 else total
        self._adds_products = dtype is total.dtype or _adds_products(total.device, dtype, total.dtype)

    def add_product(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """Add a matrix product's: `total += output_gradient.T @ inputs`, of [rows, out] and [rows, in]."""
        left, total = output_gradient.t(), self._matrix
        if left.dtype is total.dtype:
            total.addmm_(left, inputs)
        elif self._adds_products:
            torch.addmm(total, left, inputs, total.dtype, out=total)
        elif total.device.type != "cpu":
            total.add_(left @ inputs)
        else:
            # A product in fp32 would be more exact, but several times as slow where bf16 is native. In parts, so that
            # each is in the cache when it is added.
            rows = max(_SMALL * 4 // inputs.shape[1], 1)
            for sums, part in zip(total.split(rows), left.split(rows), strict=True):
                sums.add_((part @ inputs).to(sums.dtype))

    @cached_property
    def of_first_dimension(self) -> "list[AccumulatedGradient]":
        """The sums of the matrices of a weight [matrices, ..., in], one by one."""
        return [AccumulatedGradient(total, self._dtype) for total in self.total]

    def add_rows(self, indices: Tensor, output_gradient: Tensor) -> None:
        """Add a look-up's: `total[indices[i]] += output_gradient[i]`, of indices [rows] and gradients [rows, width]."""
        self.total.index_add_(0, indices, output_gradient.to(self.total.dtype))


class AccumulatedGradients:
    """The sums of many weights, as flat tensors."""

    def __init__(self, weights: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._small: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._large: list[tuple[nn.Parameter, Tensor]] = []
        for weight, flat in weights:
            total = flat.view_as(weight)
            set_sum(weight, AccumulatedGradient(total, weight.dtype))
            if weight.numel() > _SMALL:
                self._large.append((weight, total))
            else:
                self._small.append((weight, total, torch.empty_like(total)))

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients of autograd to their sums, and remove them from the weights.

        Call it after each backward. Weights without a gradient cost nothing.
        """
        for weight, total in self._large:
            if weight.grad is not None:
                total.add_(weight.grad)
                weight.grad = None
        left = [each for each in self._small if each[0].grad is not None]
        if not left:
            return
        weights, totals, wide = map(list, zip(*left, strict=True))
        # Two operations for all of them. Lists of two dtypes would add up in one for each.
        torch._foreach_copy_(wide, [weight.grad for weight in weights])
        torch._foreach_add_(totals, wide)
        for weight in weights:
            weight.grad = None


class OptimizerGradients(AccumulatedGradients):
    """The sums that a `BF16_Optimizer` without `immediate_grad_update` reduces, clips and steps with."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        pairs = [pair for weights, totals in groups for pair in zip(weights, totals, strict=True)]
        super().__init__(pairs)
        for weight, total in pairs:
            # DeepSpeed sets it with the first gradient; sums over ranks read it on ranks without a gradient, too.
            weight._hp_grad = total

    def collect(self) -> None:
        """Move the gradients of autograd, and mark the sums of the optimizer as filled."""
        super().collect()
        # The sum of a weight that got no gradient is zero, which changes neither norm nor clipping.
        self._optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in self._optimizer.bf16_groups]


@cache
def _adds_products(device: torch.device, operands: torch.dtype, total: torch.dtype) -> bool:
    """Whether a device adds products to sums of a wider dtype in one operation, as CUDA does in newer torch."""
    ones, found = torch.ones(16, 16, dtype=operands, device=device), torch.ones(16, 16, dtype=total, device=device)
    try:
        torch.addmm(found, ones, ones, total, out=found)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if device.type != "cpu":
            reason = f"{device.type} adds no products of {operands} to {total} ({str(error).partition(chr(10))[0]})"
            log_dist(f"gradients of weights take two kernels: {reason}", ranks=[0], level=logging.WARNING)
        return False
    return bool((found == 17).all())
