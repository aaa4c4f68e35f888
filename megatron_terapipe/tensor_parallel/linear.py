"""A linear layer."""

import torch
from torch import Tensor, nn

from megatron_terapipe.model import accumulation
from megatron_terapipe.model.initialization import Initializer


class Linear(nn.Module):
    """`inputs @ weight.T + bias`, whose weight gradient adds up token slice by token slice without extra traffic.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        initialize: fills the weight; the bias starts at 0.
        bias: whether there is one.
    """

    def __init__(self, in_features: int, out_features: int, initialize: Initializer, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        initialize(self.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] in, [..., out] out."""
        return accumulation.linear(inputs, self.weight, self.bias)
