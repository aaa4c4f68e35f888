"""Products of all experts in one kernel beside a loop over experts in fp64, forward and backward."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron_terapipe.model import experts
from megatron_terapipe.model.expert_dispatch import Pairs
from tests.model.configs import expert_config
from tests.model.rank_checks import ALONE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 2e-2
"""Relative error of a bf16 product and of its gradients, each beside the largest number."""


def products(layer: nn.Module, tokens: Tensor, weights: Tensor, pairs: Pairs) -> list[Tensor]:
    """Output and gradients over two token slices, the second of which adds to the first in place."""
    tokens, weights = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
    for _ in range(2):
        output = layer(tokens, weights, pairs)
        output.square().mean().backward()
    found = [output, tokens.grad, weights.grad, layer.up.grad, layer.down.grad]
    layer.zero_grad()
    return found


@pytest.mark.parametrize("pairs_of_rank", ["all", "of 6 experts"])
@pytest.mark.parametrize(("num_tokens", "hidden", "width"), [(33, 64, 48), (512, 256, 512), (2048, 1024, 704)])
def test_one_kernel(num_tokens: int, hidden: int, width: int, pairs_of_rank: str) -> None:
    """Also for experts without tokens, and for pairs of no expert of this rank."""
    gated = {"activation": "swiglu", "disable_bias_linear": True}
    model = expert_config(hidden_size=hidden, num_attention_heads=8, moe_ffn_hidden_size=width, **gated)
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = experts.Experts(model, model.blocks[0], ALONE, ALONE).bfloat16()
        chosen = torch.randint(0, 8 if pairs_of_rank == "all" else 10, (num_tokens, 2))
        chosen = chosen.where(chosen != 3, 4).clamp(max=8)
        tokens, weights = torch.randn(2 * num_tokens, hidden).bfloat16(), torch.rand(2 * num_tokens)
    pairs = Pairs.of(chosen, 8, complete=pairs_of_rank == "all")
    weights = weights * (chosen.flatten()[pairs.order_R] < 8)
    found = products(layer, tokens, weights, pairs)
    with patch.object(experts, "_has_grouped_products", lambda _: False):
        expected = products(layer.double(), tokens.double(), weights, pairs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=TOLERANCE * other.abs().max().item())
