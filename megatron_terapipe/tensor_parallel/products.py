"""Weight gradients that add up inside the operation that computes them.

Autograd computes the weight gradient of each token slice into a new tensor, then adds that to `weight.grad`: an
allocation, a write and two reads of the size of the weight for every token slice. For a matrix product the sum costs
nothing, `C += A B` being what the hardware does; for an embedding only the rows that were used need touching, not the
whole vocabulary. So from the second token slice on, these functions add to `weight.grad` themselves and tell autograd
that there is nothing left to do (Megatron's gradient accumulation fusion, arXiv 1909.08053's code base).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, the weight's gradient accumulated in place.

    Args:
        inputs: [..., in].
        weight: [out, in].
        bias: [out].

    Returns:
        [..., out].
    """
    return _Linear.apply(inputs, weight, bias)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [vocabulary, hidden] for tokens [...], its gradient accumulated in place: [..., hidden]."""
    return _Embedding.apply(tokens, weight)


def _accumulates_in_place(weight: Tensor) -> bool:
    """Whether a gradient may be added to `weight.grad` behind autograd's back.

    Not to the first one, which autograd keeps without a copy; nor where somebody asked to be called for each.
    """
    return (
        weight.is_leaf
        and weight.grad is not None
        and not (weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx, output_gradient):
        inputs, weight = ctx.saved_tensors
        rows = output_gradient.flatten(0, -2)
        of_inputs = output_gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            if _accumulates_in_place(weight):
                weight.grad.addmm_(rows.t(), inputs.flatten(0, -2))
            else:
                of_weight = rows.t() @ inputs.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, output_gradient):
        tokens, weight = ctx.saved_tensors
        in_place = _accumulates_in_place(weight)
        gradient = weight.grad if in_place else torch.zeros_like(weight)
        gradient.index_add_(0, tokens.flatten(), output_gradient.flatten(0, -2))
        return None, None if in_place else gradient
