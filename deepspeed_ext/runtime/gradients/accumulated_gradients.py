"""Gradients of bf16 weights, added up in fp32 inside the operations that compute them.

DeepSpeed's `BF16_Optimizer` keeps an fp32 sum for each bf16 weight. Its own way to fill them takes a pass over all
weights of the stage after each backward: about 20 bytes a parameter, for every token slice anew.

    DeepSpeed    zero all bf16 gradients | backward | cast all to fp32 | add all
    here         backward: sum += dY^T X, once for each weight        | add what is left: norms, biases

An operation that can do so asks its weight for the attribute `accumulated_gradient` and adds to that. All others leave
a bf16 gradient to autograd, as always, and `collect` moves it to its sum.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_SMALL = 1 << 16
"""Numbers of a gradient whose time is that of starting an operation; more, and it is that of its bytes."""


class AccumulatedGradient:
    """Where the gradient of one weight adds up.

    Args:
        total: the sum so far, of the weight's shape; added to in place.
        dtype: type of the factors.
    """

    def __init__(self, total: Tensor, dtype: torch.dtype) -> None:
        self.total = total
        # A weight of more than two dimensions multiplies as a matrix.
        self._matrix = total.flatten(0, -2) if total.dim() > 1 else total
        self._adds_products = dtype is total.dtype or _adds_products(total.device, dtype, total.dtype)

    def add_product(self, output_gradient: Tensor, inputs: Tensor) -> None:
        """Add the gradient that a matrix product gives its weight: `total += output_gradient.T @ inputs`.

        Args:
            output_gradient: [rows, out].
            inputs: [rows, in].
        """
        left, total = output_gradient.t(), self._matrix
        if left.dtype is total.dtype:
            total.addmm_(left, inputs)
        elif self._adds_products:
            torch.addmm(total, left, inputs, total.dtype, out=total)
        else:
            # A product in fp32 would be more exact, and take several times as long where bf16 is multiplied natively.
            # A part at a time, so that it is still in the cache when it is added.
            rows = max(_SMALL * 4 // inputs.shape[1], 1)
            for sums, part in zip(total.split(rows), left.split(rows), strict=True):
                sums.add_((part @ inputs).to(sums.dtype))

    def add_rows(self, indices: Tensor, output_gradient: Tensor) -> None:
        """Add the gradient that a look-up gives its table: `total[indices[i]] += output_gradient[i]`.

        Args:
            indices: [rows].
            output_gradient: [rows, width].
        """
        self.total.index_add_(0, indices, output_gradient.to(self.total.dtype))


class AccumulatedGradients:
    """The sums of many weights. Each weight gets its own as the attribute `accumulated_gradient`.

    Args:
        weights: each with its sum, a tensor of as many numbers.
    """

    def __init__(self, weights: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._small: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._large: list[tuple[nn.Parameter, Tensor]] = []
        for weight, flat in weights:
            total = flat.view_as(weight)
            weight.accumulated_gradient = AccumulatedGradient(total, weight.dtype)
            if weight.numel() > _SMALL:
                self._large.append((weight, total))
            else:
                self._small.append((weight, total, torch.empty_like(total)))

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients that autograd has left to their sums; no weight has a `grad` then.

        To be called after each backward. Weights without a gradient cost nothing.
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
    """The sums that a `BF16_Optimizer` reduces, clips and steps with.

    Args:
        optimizer: one that does not ask to be called for each gradient (`immediate_grad_update`).
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        pairs = [pair for weights, totals in groups for pair in zip(weights, totals, strict=True)]
        super().__init__(pairs)
        for weight, total in pairs:
            # DeepSpeed sets it with the first gradient; sums over ranks look for it, on ranks that found none too.
            weight._hp_grad = total

    def collect(self) -> None:
        """Move what autograd has left, and tell the optimizer that its sums are filled."""
        super().collect()
        # The sum of a weight that got no gradient is zero, which changes neither norm nor clipping.
        self._optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in self._optimizer.bf16_groups]


@cache
def _adds_products(device: torch.device, operands: torch.dtype, total: torch.dtype) -> bool:
    """Whether a device adds products to sums of a wider dtype in one operation, as CUDA does in newer torch."""
    ones, found = torch.ones(16, 16, dtype=operands, device=device), torch.ones(16, 16, dtype=total, device=device)
    try:
        torch.addmm(found, ones, ones, total, out=found)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return bool((found == 17).all())
