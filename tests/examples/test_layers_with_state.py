"""The example's layers with a state: token slices and documents against whole sequences, and a hybrid on two stages."""

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from examples.layers_with_state import CausalConvolution, GatedDeltaNet, LinearAttention, Mamba2, TokenShift
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import Setup, build, feed

WIDTH, TOKENS, CUT = 16, 100, (37, 1, 2, 60)
KINDS = [CausalConvolution, TokenShift, LinearAttention, GatedDeltaNet, Mamba2]
STARTS = ((0, 36, 37, 70), (0, 39))


def trained(layer: nn.Module, inputs: Tensor, cut: tuple[int, ...], starts: tuple[tuple[int, ...], ...] | None) -> list:
    """Outputs, and gradients of inputs and weights, one backward for each token slice as in the engine."""
    layer.zero_grad()
    inputs = inputs.detach().requires_grad_()
    state = SequenceState(TokenSlices(cut), documents=None if starts is None else Documents(starts))
    outputs = [layer(part, state.past(0, number)) for number, part in enumerate(inputs.split(cut, dim=1))]
    weights = torch.linspace(-1, 1, inputs.numel(), dtype=torch.float64).view_as(inputs).split(cut, dim=1)
    for number in reversed(range(len(cut))):
        roots = [((outputs[number] * weights[number]).sum(), None), *state.carried.roots(number)]
        torch.autograd.backward(*zip(*roots, strict=True))
    return [torch.cat(outputs, 1).detach(), inputs.grad, *(weight.grad.clone() for weight in layer.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_token_slices_and_documents(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer, inputs = kind(WIDTH).double(), torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    for starts in (None, STARTS):
        expected, found = (trained(layer, inputs, cut, starts) for cut in ((TOKENS,), CUT))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for row, of_row in enumerate(STARTS):
        for start, end in zip(of_row, (*of_row[1:], TOKENS), strict=True):
            past = SequenceState(TokenSlices((end - start,))).past(0, 0)
            alone = layer(inputs[row : row + 1, start:end], past)
            torch.testing.assert_close(found[0][row : row + 1, start:end], alone.detach(), rtol=1e-12, atol=1e-12)
    changed = inputs.clone()
    changed[:, 50] += 1
    moved = (trained(layer, changed, CUT, None)[0] - expected_of(layer, inputs)).abs().amax((0, 2)) > 0
    assert not moved[:50].any() and moved[50:52].all(), "a token changes no earlier one"


def expected_of(layer: nn.Module, inputs: Tensor) -> Tensor:
    return trained(layer, inputs, CUT, None)[0]


class Residual(nn.Module):
    """A layer with a state beside a residual, with a norm."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(models.HIDDEN), kind(models.HIDDEN)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        return hidden + self.layer(self.norm(hidden), past)


SETUPS = [
    Setup(pp=1, sp=2, cut=(models.SEQ,), dtype="fp64"),
    Setup(pp=2, cut=(11, 1, 7, 5), dtype="fp64"),
    Setup(pp=2, cut=(11, 1, 7, 5), dtype="fp64", schedule="zero-bubble", recompute_stages=True),
    Setup(pp=1, sp=2, cut=(12, 2, 4, 6), dtype="fp64", recompute=1),
]


def _losses(setups: list[Setup]) -> list[list[float]]:
    return [_of_setup(setup) for setup in setups]


def _of_setup(setup: Setup) -> list[float]:
    mixers = [LayerSpec(Residual, kind) for kind in (Mamba2, GatedDeltaNet, CausalConvolution)]
    layers = [
        *(LayerSpec(models.Embedding), *mixers[:2], LayerSpec(models.Block), mixers[2]),
        LayerSpec(nn.Linear, models.HIDDEN, models.VOCAB),
    ]
    engine = build(
        setup, layers=layers, partition="uniform", optimizer=lambda weights: torch.optim.SGD(weights, lr=0.3)
    )
    return [engine.train_batch(feed(engine, setup)).item() for _ in range(3)]


def test_a_hybrid_trains_on_two_stages_as_on_one_process() -> None:
    ((alone,),) = run_distributed(_losses, 1, [Setup(dtype="fp64")])
    assert alone[2] < alone[0]
    for of_rank in run_distributed(_losses, 2, SETUPS):
        for losses in of_rank:
            assert losses == pytest.approx(alone, rel=1e-12)
