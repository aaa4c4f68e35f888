"""Rotations against multiplication by complex numbers."""

import cmath
from math import cos, sin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_terapipe.model.rotary import Rotation
from tests.model.plain import rotated


def heads_of(rows: int = 2, length: int = 7, heads: int = 3, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, length, heads, width, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_each_pair_of_channels_is_a_complex_number_that_turns(channels: int) -> None:
    heads = heads_of()
    positions = torch.arange(7).unsqueeze(0) + 11
    found = Rotation(positions, channels, 100.0, heads)(heads).detach()
    half = channels // 2
    for row, token, head in [(0, 0, 0), (0, 6, 1), (1, 3, 2), (1, 5, 0)]:
        before, after = heads[row, token, head].tolist(), found[row, token, head].tolist()
        for channel in range(half):
            turn = cmath.exp(1j * (11 + token) * 100.0 ** (-2 * channel / channels))
            turned = complex(before[channel], before[channel + half]) * turn
            assert after[channel] == pytest.approx(turned.real, abs=1e-14)
            assert after[channel + half] == pytest.approx(turned.imag, abs=1e-14)
        assert after[channels:] == before[channels:]


def test_the_gradient_turns_back() -> None:
    heads = heads_of()
    rotate = Rotation(torch.arange(7).unsqueeze(0), 6, 100.0, heads)
    assert torch.autograd.gradcheck(rotate, heads)
    (gradient,) = torch.autograd.grad(rotate(heads), heads, grad_outputs=rotate(heads.detach()))
    torch.testing.assert_close(gradient, heads.detach(), rtol=1e-13, atol=1e-14)


def test_nothing_of_the_heads_is_kept() -> None:
    kept = []
    heads = heads_of()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda tensor: tensor):
        Rotation(torch.arange(7).unsqueeze(0), 8, 100.0, heads)(heads)
    assert {each.numel() for each in kept} == {7 * 4}


def test_positions_may_differ_by_row() -> None:
    heads = heads_of().detach()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [5, 6, 0, 1, 2, 3, 0]])
    found = Rotation(positions, 8, 100.0, heads)(heads)
    for row, token in [(0, 0), (0, 6), (1, 0), (1, 2), (1, 5), (1, 6)]:
        expected = rotated(heads[row : row + 1, token : token + 1, 0], 8, 100.0, int(positions[row, token]))
        torch.testing.assert_close(found[row, token, 0], expected[0, 0], rtol=1e-13, atol=1e-14)


@given(first=st.integers(0, 100_000), apart=st.integers(0, 1000), moved=st.integers(0, 100_000))
def test_scores_depend_on_the_distance_alone(first: int, apart: int, moved: int) -> None:
    query, key = heads_of(1, 1, 1).detach(), heads_of(1, 2, 1)[:, 1:].detach()

    def score(position: int) -> Tensor:
        turned = [
            Rotation(torch.tensor([[each]]), 8, 10000.0, query)(heads)
            for each, heads in ((position + apart, query), (position, key))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(first), score(first + moved), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("position", [3, 100_003, 1_000_003])
def test_far_positions_are_as_exact_as_near_ones(position: int, dtype: torch.dtype) -> None:
    one = torch.zeros(1, 1, 1, 64, dtype=dtype)
    one[..., :32] = 1
    found = Rotation(torch.tensor([[position]]), 64, 10000.0, one)(one)[0, 0, 0]
    assert found.dtype is dtype
    angles = [position * 10000.0 ** (-channel / 32) for channel in range(32)]
    expected = torch.tensor([*map(cos, angles), *map(sin, angles)], dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=torch.finfo(dtype).eps)
