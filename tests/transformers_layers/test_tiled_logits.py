"""The loss of logits that are computed for some tokens at a time is that of all at once, and so are its gradients."""

import pytest
import torch
from torch import nn

from deepspeed_ext.transformers_layers import TiledLogits, summed_loss

HIDDEN = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[3, -100, 1, 0, 10, 4, 4], [-100, -100, -100, 2, 9, 9, -100]])


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 11, bias=False, dtype=torch.float64)


@pytest.mark.parametrize("at_once", [1, 44, 1000])
def test_tiles_change_nothing(at_once: int) -> None:
    whole, tiled = head(), head()
    hidden, same = (HIDDEN.clone().requires_grad_() for _ in range(2))
    expected = summed_loss(whole(hidden), LABELS)
    found = TiledLogits(same, tiled, 11).summed_loss(LABELS, at_once=at_once)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(same.grad, hidden.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(tiled.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-15)


def test_logits_are_computed_for_a_few_tokens_at_a_time_and_again_in_the_backward() -> None:
    lengths, projection = [], head()

    def project(hidden: torch.Tensor) -> torch.Tensor:
        lengths.append(hidden.shape[1])
        return projection(hidden)

    logits = TiledLogits(HIDDEN.clone().requires_grad_(), project, 11)
    loss = logits.summed_loss(LABELS, at_once=2 * 11 * 3)
    assert lengths == [3, 3, 1]
    loss.backward()
    assert sorted(lengths) == [1, 1, 3, 3, 3, 3]
    assert summed_loss(logits, LABELS).item() == pytest.approx(loss.item(), rel=1e-12)
