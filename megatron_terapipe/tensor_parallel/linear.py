"""Linear layers of which each rank holds a part."""

import torch
from torch import Tensor, nn

from megatron_terapipe.tensor_parallel import products
from megatron_terapipe.tensor_parallel.ranks import Initializer, TensorParallelRanks


class ColumnParallelLinear(nn.Module):
    """`inputs @ weight.T + bias`, of which each rank computes some of the outputs.

    Args:
        out_features: width of the whole output; two numbers for several outputs of one width, of each of which the
            rank computes its part.
        ranks: ranks that share it.
        initialize: fills the weight; the bias starts at 0.
        bias: whether there is one.
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
            inputs: input of this layer, or of the one before.
            recomputed: the layer before, whose output is then computed again in the backward instead of kept.
        """
        return products.linear(
            inputs,
            self.weight,
            self.bias,
            ranks=self.ranks,
            before=recomputed,
            parameters_before=() if recomputed is None else recomputed.parameters(),
        )


class RowParallelLinear(nn.Module):
    """`inputs @ weight.T + bias`, of which each rank multiplies some of the inputs; the sum goes to all.

    Args:
        ranks: ranks that share it.
        initialize: fills the weight; the bias starts at 0.
        bias: whether there is one.
    """

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
            inputs: input of this layer, or of the one before.
            recomputed: the layer before, whose output is then computed again in the backward instead of kept.
            completed: whether ranks sum their parts; if not, this is the part [B, N, out] of this rank, of all tokens,
                for `complete`.
        """
        # One rank alone adds the bias inside the product; of several, each would.
        alone = self.ranks.size == 1
        part = products.linear(
            inputs,
            self.weight,
            self.bias if alone else None,
            before=recomputed,
            parameters_before=() if recomputed is None else recomputed.parameters(),
        )
        return self.complete(part, self.bias) if completed else part

    def complete(self, part: Tensor, *biases: Tensor | None) -> Tensor:
        """Return the sum [B, n, out] of the parts of all ranks, and of biases.

        Args:
            part: [B, N, out] this rank's part; several layers' parts may be added up before.
            biases: [out] those of the layers; one rank alone has added them.
        """
        summed = self.ranks.sum_parts(part)
        for bias in biases if self.ranks.size > 1 else ():
            summed = summed if bias is None else summed + bias
        return summed
