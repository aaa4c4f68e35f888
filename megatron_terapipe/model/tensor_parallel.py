"""Matrices that ranks share, as Megatron cuts them (Shoeybi et al., arXiv 1909.08053 section 3).

    columns     rows                  Every rank holds a part of each matrix:
    X @ [A1|A2] , Y1 @ [B1]           the first by columns, the second by rows, without communication between them.
                  + Y2 @ [B2]         One sum per pair, forward and backward.

With sequence parallelism (Korthikanti et al., arXiv 2205.05198 section 4.2.2) that sum becomes a reduce-scatter along
the tokens, and a gather before the next pair: the same traffic, and between the pairs each rank has only its tokens.

Weight gradients add up inside the operation that computes them (Megatron's gradient accumulation fusion). Autograd
would compute the gradient of each token slice into a new tensor, and then add it to `weight.grad`. In a matrix product
the sum is free, `C += A B` being an operation of the hardware; an embedding touches only the rows that were used. The
sum of a weight, and whether its products are deferred, are asked of `runtime/gradients/weight_gradients.py`. Until a
deferred product is computed, the gradient of its output and its own input are kept, as this rank has it:

    sequence parallel    its own tokens, gathered later: one gather in any case, and less memory in between
    computed again       the result: no larger than the tensors that the forward kept, and needed by the input gradient
                         as well; keeping the raw input instead would cost a third computation
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.runtime.gradients.weight_gradients import is_deferred, now_or_deferred, sum_of
from deepspeed_ext.runtime.topology import Pending, Ranks, pending

__all__ = ["TensorParallelRanks", "linear"]


class WeightPart(NamedTuple):
    """The part of a weight that a rank holds."""

    shape: tuple[int, ...]
    cut: int = 0
    """Dimension that ranks share."""
    start: int = 0
    """First index of the part in that dimension."""


Initializer = Callable[[Tensor, WeightPart], object]
"""Fills a part of a weight in place, with the same values as if it filled the whole."""


@dataclass(frozen=True, slots=True)
class TensorParallelRanks(Ranks):
    """Ranks that share each layer's matrices."""

    sequence_parallel: bool = False
    """Between the matrices, each has its part of the tokens."""

    def parameter(self, *shape: int, cut: int, initialize: Initializer | None) -> nn.Parameter:
        """This rank's part of a weight. The values of the whole are the same for any number of ranks.

        Args:
            initialize: fills the part in place; None leaves it at 0.
        """
        assert shape[cut] % self.size == 0, "the configuration allows only sizes that ranks share evenly"
        length = shape[cut] // self.size
        part = torch.zeros(*shape[:cut], length, *shape[cut + 1 :])
        if initialize is not None:
            initialize(part, WeightPart(shape, cut, self.rank * length))
        parameter = nn.Parameter(part)
        # Read by DeepSpeed to count norms, by the checkpoint to put parts together.
        parameter.tensor_model_parallel = True
        parameter.partition_dim = cut
        return parameter

    def replicated(self, weight: Tensor, *, of_heads: bool = False) -> nn.Parameter:
        """Return a parameter [...] that every rank holds whole and applies to its own tokens, or to its own heads."""
        parameter = nn.Parameter(weight)
        # Read by the runtime, which sums the gradient over ranks: each has a part of it.
        parameter.sequence_parallel = self.sequence_parallel or (of_heads and self.size > 1)
        return parameter

    def whole(self, *shape: int, initialize: Initializer | None) -> nn.Parameter:
        """Return a parameter that every rank draws whole, and applies to its own tokens; None leaves it at 0."""
        weight = torch.zeros(*shape)
        if initialize is not None:
            initialize(weight, WeightPart(shape))
        return self.replicated(weight)

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Return the tokens that this rank has between the matrices: [B, n, ...] of `whole` [B, N, ...]."""
        return whole.chunk(self.size, dim=1)[self.rank] if self.sequence_parallel else whole

    def first_token(self, num_tokens: int) -> int:
        """Tokens of other ranks before the `num_tokens` that this rank has between the matrices."""
        return self.rank * num_tokens if self.sequence_parallel else 0

    def start_sum(self, part: Tensor) -> Pending:
        """Start to sum a tensor [...] over all ranks, in place."""
        if self.size == 1:
            return lambda: part
        return pending(dist.all_reduce(part, group=self.group, async_op=True), lambda: part)

    def start_complete(self, partial: Tensor) -> Pending:
        """Start to sum partial results [B, N, ...]; each rank gets its tokens between the matrices: [B, n, ...]."""
        return self.start_reduce_scatter(partial) if self.sequence_parallel else self.start_sum(partial)

    def share(self, own: Tensor) -> Tensor:
        """Return [B, N, C] of all tokens for the tokens [B, n, C] that this rank has between the matrices.

        Backward, the gradients that all ranks find for them, each from its own heads, are summed.
        """
        if self.size == 1:
            return own
        return self.gather_tokens(own) if self.sequence_parallel else _Share.apply(own, self)

    def sum_parts(self, partial: Tensor) -> Tensor:
        """Sum the parts of all ranks: [B, N, C] to the tokens this rank has between the matrices.

        Backward, every rank gets the gradients of all tokens.
        """
        return partial if self.size == 1 else _SumParts.apply(partial, self)


class _Share(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx, own, ranks: TensorParallelRanks):
        ctx.ranks = ranks
        return own.view_as(own)

    @staticmethod
    def backward(ctx, of_shared):
        # A sum is in place, and autograd may give the gradient to others, too.
        return ctx.ranks.start_sum(of_shared.clone())(), None


class _SumParts(torch.autograd.Function):
    """Megatron's g, or g bar with sequence parallelism."""

    @staticmethod
    def forward(ctx, partial, ranks: TensorParallelRanks):
        ctx.ranks = ranks
        # Summed in place: the part was just computed by a product or an embedding, and is not kept.
        return ranks.start_complete(partial.detach())()

    @staticmethod
    def backward(ctx, output_gradient):
        ranks = ctx.ranks
        return ranks.start_gather(output_gradient)() if ranks.sequence_parallel else output_gradient, None


def linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    ranks: TensorParallelRanks | None = None,
    before: nn.Module | None = None,
) -> Tensor:
    """`inputs @ weight.T + bias`, the weight's gradient accumulated in place.

    Args:
        inputs: [..., in]; [B, n, in] of this rank's tokens where `ranks` are sequence-parallel.
        weight: [..., in], a matrix once its first dimensions are taken together.
        bias: bias of the weight's shape without its last dimension.
        ranks: that hold the other rows of the weight and need the gradient of the same inputs; None for none.
        before: layer applied to the inputs first; it is recomputed in the backward.

    Returns:
        [..., out], of all tokens.
    """
    ranks = ranks or TensorParallelRanks()
    return _ParallelProduct.apply(inputs, weight, bias, ranks, before, *(() if before is None else before.parameters()))


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return rows of `weight`, with its gradient accumulated in place: [..., hidden].

    Args:
        tokens: [...], the row of each token.
        weight: [vocabulary, hidden].
    """
    return _Embedding.apply(tokens, weight)


class _ParallelProduct(torch.autograd.Function):
    """The product; its collectives run under the products that do not wait for them.

    gather the inputs      | gradient of inputs |
                             sum it over ranks  | gradient of the weight |
    """

    @staticmethod
    def forward(ctx, inputs, weight, bias, ranks: TensorParallelRanks, before, *parameters_before):
        ctx.save_for_backward(inputs, weight, *parameters_before)
        # Where a forward is repeated, autograd gives back a copy of the weight that has no gradient.
        ctx.parameter = weight
        ctx.has_bias, ctx.ranks, ctx.before = bias is not None, ranks, before
        if before is not None:
            inputs = before(inputs)
        if ranks.sequence_parallel:
            inputs = ranks.start_gather(inputs)()
        return F.linear(inputs, weight.flatten(0, -2), None if bias is None else bias.flatten())

    @staticmethod
    def backward(ctx, output_gradient):
        raw, weight, *parameters_before = ctx.saved_tensors
        ranks, of_inputs, of_weight, of_bias = ctx.ranks, None, None, None
        # The weights of a norm may need a gradient where its input does not, and the reverse.
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[5:]]
        inputs = raw
        if ctx.before is not None:
            with torch.enable_grad():
                raw = raw.detach().requires_grad_()
                inputs = ctx.before(raw)
        if ctx.needs_input_grad[1]:
            gather = _gather(inputs.detach(), ranks, later=is_deferred(ctx.parameter))
        if any(needed):
            of_all_inputs = output_gradient @ weight.flatten(0, -2)
            of_inputs = ranks.start_complete(of_all_inputs)
        if ctx.needs_input_grad[1]:
            of_weight = now_or_deferred(ctx.parameter, _product(ctx.parameter, output_gradient, gather))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = output_gradient.flatten(0, -2).sum(0).view(weight.shape[:-1])
        found = [None for _ in needed] if of_inputs is None else [of_inputs()]
        if ctx.before is not None and of_inputs is not None:
            differentiated = list(compress([raw, *parameters_before], needed))
            gradients = iter(torch.autograd.grad(inputs, differentiated, found[0]))
            found = [next(gradients) if each else None for each in needed]
        of_raw, *of_parameters = found
        return of_raw, of_weight, of_bias, None, None, *of_parameters


def _gather(inputs: Tensor, ranks: TensorParallelRanks, *, later: bool) -> Pending:
    """The inputs of all tokens; gathered now, or once the result is called."""
    if not ranks.sequence_parallel:
        return lambda: inputs
    return (lambda: ranks.start_gather(inputs)()) if later else ranks.start_gather(inputs)


def _product(weight: Tensor, output_gradient: Tensor, gather: Pending) -> Callable[[], Tensor | None]:
    """The product of a weight's gradient; a function of its own, so that only these tensors are kept."""
    return lambda: accumulate(weight, output_gradient, gather())


def accumulate(
    weight: Tensor, output_gradient: Tensor, inputs: Tensor, of_weight: Tensor | None = None
) -> Tensor | None:
    """Add a product of [..., out] and [..., in] to the gradient of a weight [out, in].

    Args:
        of_weight: result for the products before, in the same backward; None for the first.

    Returns:
        The gradient that autograd has to add; None once it is added to a sum.
    """
    rows, inputs = output_gradient.flatten(0, -2), inputs.flatten(0, -2)
    if of_weight is not None:
        return of_weight.addmm_(rows.t(), inputs)
    total = sum_of(weight)
    return (rows.t() @ inputs).view_as(weight) if total is None else total.add_product(rows, inputs)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.parameter = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, output_gradient):
        (tokens,), weight = ctx.saved_tensors, ctx.parameter
        # The input is a number, so all of this backward is for the weight.
        return None, now_or_deferred(weight, partial(_embedding_gradient, weight, tokens, output_gradient))


def _embedding_gradient(weight: Tensor, tokens: Tensor, output_gradient: Tensor) -> Tensor | None:
    """The gradient, or None once it is added to a sum."""
    indices, rows = tokens.flatten(), output_gradient.flatten(0, -2)
    total = sum_of(weight)
    return torch.zeros_like(weight).index_add_(0, indices, rows) if total is None else total.add_rows(indices, rows)


class ColumnParallelLinear(nn.Module):
    """`inputs @ weight.T + bias`, of which each rank computes some of the outputs.

    Args:
        out_features: width of the whole output; two numbers for several outputs of one width, of each of which the
            rank computes its part.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, int],
        ranks: TensorParallelRanks,
        initialize: Initializer,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        outputs = (out_features,) if isinstance(out_features, int) else out_features
        cut = len(outputs) - 1
        self.weight = ranks.parameter(*outputs, in_features, cut=cut, initialize=initialize)
        self.bias = ranks.parameter(*outputs, cut=cut, initialize=None) if bias else None

    def forward(self, inputs: Tensor, recomputed: nn.Module | None = None) -> Tensor:
        """Return the output [B, N, out / size] of all tokens for the inputs [B, n, in] of this rank's tokens.

        Args:
            recomputed: the layer before, if its output is recomputed in the backward instead of kept.
        """
        return linear(inputs, self.weight, self.bias, ranks=self.ranks, before=recomputed)


class RowParallelLinear(nn.Module):
    """`inputs @ weight.T + bias`, of which each rank multiplies some of the inputs; the sum goes to all."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: TensorParallelRanks,
        initialize: Initializer,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.weight = ranks.parameter(out_features, in_features, cut=1, initialize=initialize)
        self.bias = ranks.replicated(torch.zeros(out_features)) if bias else None

    def forward(self, inputs: Tensor, recomputed: nn.Module | None = None, *, completed: bool = True) -> Tensor:
        """Return the output [B, n, out] of this rank's tokens for the inputs [B, N, in / size] of all tokens.

        Args:
            recomputed: the layer before, if its output is recomputed in the backward instead of kept.
            completed: whether ranks sum their parts; if not, this is the part [B, N, out] of this rank, of all tokens,
                for `complete`.
        """
        # A single rank adds the bias inside the product; of several ranks, each would.
        single = self.ranks.size == 1
        part = linear(inputs, self.weight, self.bias if single else None, before=recomputed)
        return self.complete(part, self.bias) if completed else part

    def complete(self, part: Tensor, *biases: Tensor | None) -> Tensor:
        """Return the sum [B, n, out] of the parts of all ranks, and of biases.

        Args:
            part: [B, N, out] this rank's part; several layers' parts may be added up before.
            biases: [out] of the layers; a single rank has added them already.
        """
        summed = self.ranks.sum_parts(part)
        for bias in biases if self.ranks.size > 1 else ():
            summed = summed if bias is None else summed + bias
        return summed
