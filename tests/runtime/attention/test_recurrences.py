"""Convolution and linear attention of token slices, against loops over tokens."""

import pytest
import torch
from torch import Tensor

from deepspeed_ext.runtime.attention.recurrences import causal_convolution, linear_attention

ROWS, TOKENS, GROUPS, HEADS, KEY, VALUE, TAPS = 2, 150, 2, 4, 3, 5, 4
CUTS = [(TOKENS,), (70, 1, 2, 77)]
BEGINS = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
BEGINS[0, [0, 3, 64, 71, 140]] = True
BEGINS[1, [0, 69, 70, 72, 130, 149]] = True


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("begins", [None, BEGINS], ids=["one document", "documents"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_convolution(cut: tuple[int, ...], begins: Tensor | None) -> None:
    torch.manual_seed(0)
    inputs, weight, before = draw(ROWS, TOKENS, HEADS), draw(HEADS, TAPS), draw(ROWS, TAPS - 1, HEADS)
    outputs, window = [], before
    for token in range(TOKENS):
        if begins is not None:
            window = window * ~begins[:, token, None, None]
        window = torch.cat((window, inputs[:, token : token + 1]), dim=1)
        outputs.append((window * weight.T).sum(1))
        window = window[:, 1:]
    found, state = [], before
    for part, starts in zip(inputs.split(cut, 1), _split(begins, cut), strict=True):
        output, state = causal_convolution(part, weight, state, starts)
        found.append(output)
    assert_equal(outputs, window, found, state, (inputs, weight, before))


@pytest.mark.parametrize("delta", [False, True], ids=["linear", "delta"])
@pytest.mark.parametrize("begins", [None, BEGINS], ids=["one document", "documents"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_linear_attention(cut: tuple[int, ...], begins: Tensor | None, delta: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (
        draw(ROWS, TOKENS, GROUPS, KEY),
        draw(ROWS, TOKENS, GROUPS, KEY),
        draw(ROWS, TOKENS, HEADS, VALUE),
    )
    raw, rate, first = draw(ROWS, TOKENS, HEADS), draw(ROWS, TOKENS, HEADS), draw(ROWS, HEADS, KEY, VALUE)
    unit = torch.nn.functional.normalize(key, dim=-1)
    log_decay, strength = torch.nn.functional.logsigmoid(raw), rate.sigmoid()
    state, outputs = first, []
    for token in range(TOKENS):
        k, q = (each[:, token].repeat_interleave(HEADS // GROUPS, 1) for each in (unit, query))
        if begins is not None:
            state = state * ~begins[:, token, None, None, None]
        state = log_decay[:, token].exp()[..., None, None] * state
        new = value[:, token]
        if delta:
            new = strength[:, token, :, None] * (new - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + torch.einsum("bhk,bhv->bhkv", k, new)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    found, carried = [], first
    tensors = [query, unit, value, log_decay, strength]
    for *parts, starts in zip(*(each.split(cut, 1) for each in tensors), _split(begins, cut), strict=True):
        output, carried = linear_attention(*parts[:4], carried, rate=parts[4] if delta else None, begins=starts)
        found.append(output)
    given = (query, key, value, raw, first, *([rate] if delta else []))
    assert_equal(outputs, state, found, carried, given)


def _split(begins: Tensor | None, cut: tuple[int, ...]) -> list[Tensor | None]:
    return [None] * len(cut) if begins is None else list(begins.split(cut, 1))


def assert_equal(
    outputs: list[Tensor], state: Tensor, found: list[Tensor], carried: Tensor, inputs: tuple[Tensor, ...]
) -> None:
    """Outputs of tokens, outputs of token slices, last states, and gradients of both."""
    gradients = []
    for whole, last in ((torch.stack(outputs, 1), state), (torch.cat(found, 1), carried)):
        weights = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).view_as(whole)
        loss = (whole * weights).sum() + last.square().sum()
        gradients.append((whole, last, *torch.autograd.grad(loss, inputs, retain_graph=True)))
    for expected, other in zip(*gradients, strict=True):
        torch.testing.assert_close(other, expected, rtol=1e-12, atol=1e-12)
