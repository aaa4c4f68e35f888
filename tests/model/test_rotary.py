"""Rotations against multiplication by complex numbers."""

import cmath
from math import cos, sin
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measuring.counters import KernelCounter
from megatron_terapipe.config.rotation import Rotation, frequencies_of_base
from megatron_terapipe.model import rotary
from megatron_terapipe.model.rotary import RotaryTable, rotated, rotated_heads
from tests.model import plain


def product_of(rows: int = 2, length: int = 7, groups: int = 2, heads: int = 4, width: int = 8) -> Tensor:
    """Two query heads, a key head and a value head in each group, or as many as given."""
    generator = torch.Generator().manual_seed(0)
    shape = rows, length, groups, heads, width
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def rotation_of(channels: int, base: float = 100.0, **more: Any) -> Rotation:
    return Rotation("rotation", frequencies_of_base(base, channels), **more)


def rotate(
    product: Tensor, first: int, channels: int, base: float = 100.0, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rotation, end = rotation_of(channels, base, **more), first + product.shape[1]
    turns = RotaryTable(rotation, 16).between(first, end, product)
    return rotated_heads(product, *turns, interleaved=rotation.interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("channels", [2, 4, 8])
def test_each_pair_of_channels_is_a_complex_number_that_turns(channels: int, interleaved: bool) -> None:
    product = product_of()
    query, key, value = rotate(product, 11, channels, factor=1.5, interleaved=interleaved)
    assert torch.equal(value, product[..., -1, :])
    half = channels // 2
    before, after = product.detach(), torch.cat((query.detach().unflatten(2, (2, 2)), key.detach().unsqueeze(3)), 3)
    for row, token, group, head in [(0, 0, 0, 0), (0, 6, 1, 1), (1, 3, 0, 2), (1, 5, 1, 2)]:
        place = row, token, group, head
        before_, after_ = before[place].tolist(), after[place].tolist()
        for channel in range(half):
            turn = 1.5 * cmath.exp(1j * (11 + token) * 100.0 ** (-2 * channel / channels))
            real, imaginary = (2 * channel, 2 * channel + 1) if interleaved else (channel, channel + half)
            turned = complex(before_[real], before_[imaginary]) * turn
            assert after_[real] == pytest.approx(turned.real, abs=1e-14)
            assert after_[imaginary] == pytest.approx(turned.imag, abs=1e-14)
        assert after_[channels:] == before_[channels:]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_heads_apart_turn_as_those_of_a_product(interleaved: bool) -> None:
    product, rotation = product_of(), rotation_of(6, factor=0.5, interleaved=interleaved)
    turns = RotaryTable(rotation, 16).between(3, 10, product)
    query, key, _ = rotated_heads(product, *turns, interleaved=interleaved)
    apart = product[..., :-2, :].flatten(2, 3), product[..., -2, :]
    found = [rotated(each, *turns, interleaved=interleaved) for each in apart]
    assert all(map(torch.equal, found, (query, key)))
    gradients = [
        torch.autograd.grad(sum(each.square().sum() for each in two), product) for two in (found, (query, key))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradcheck(lambda each: rotate(each, 0, 6, factor=0.5, interleaved=interleaved), product)


def test_positions_may_differ_by_row() -> None:
    product = product_of().detach()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [5, 6, 0, 1, 2, 3, 0]])
    _, found, _ = rotated_heads(product, *RotaryTable(rotation_of(8), 7).at(positions, 7, product))
    for row, token in [(0, 0), (0, 6), (1, 0), (1, 2), (1, 5), (1, 6)]:
        key = product[row : row + 1, token : token + 1, :, -2]
        expected = plain.rotated(key, rotation_of(8), int(positions[row, token]))
        torch.testing.assert_close(found[row, token], expected[0, 0], rtol=1e-13, atol=1e-14)


def test_a_table_is_computed_once_and_again_only_where_it_falls_short() -> None:
    table, like = RotaryTable(rotation_of(8), 16), torch.zeros(1)
    first, _ = table.between(0, 4, like)
    second, _ = table.between(4, 16, like)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    longer, _ = table.between(0, 20, like)
    assert longer.shape[1] == 20
    assert torch.equal(longer[:, :4], first)
    assert table.between(0, 4, like.double())[0].dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("start", [0, (1 << 20) - 3, (1 << 21) + 1, (1 << 24) - 7])
def test_of_a_large_table_each_token_slice_computes_its_own_positions(start: int, dtype: torch.dtype) -> None:
    rotation, like, end = rotation_of(64, 500_000.0, factor=1.25), torch.zeros(1, dtype=dtype), start + 6
    table = RotaryTable(rotation, 1 << 24)
    in_order = table.between(start, end, like)
    assert sum(each.untyped_storage().nbytes() for each in in_order[:1]) == 2 * 6 * 32 * dtype.itemsize
    restarting = table.at(torch.tensor([[start + 5, 0], [start, 1]]), end, like)
    assert [each.shape for each in (*in_order, *restarting)] == [(1, 6, 1, 32)] * 2 + [(2, 2, 1, 32)] * 2
    for function, found, of_positions in zip((cos, sin), in_order, restarting, strict=True):
        expected = [[1.25 * function(at * each) for each in rotation.frequencies] for at in range(start, end)]
        rounding = torch.finfo(dtype).eps if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(
            found[0, :, 0].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=rounding
        )
        assert torch.equal(of_positions[:, 0, 0], found[0, [5, 0], 0])


@pytest.mark.parametrize("at_once", [1, 5 * 32, rotary.ANGLES_AT_ONCE])
def test_tables_have_the_bits_of_one_frequency_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "ANGLES_AT_ONCE", at_once)
    rotation, like, start = rotation_of(64, 500_000.0, factor=1.25), torch.zeros(1), (1 << 20) - 3
    found = RotaryTable(rotation, 1 << 24).between(start, start + 23, like)
    positions = torch.arange(start, start + 23, dtype=torch.float64)
    for function, turns in zip((torch.cos, torch.sin), found, strict=True):
        columns = [function(positions * each).mul(1.25).float() for each in rotation.frequencies]
        assert torch.equal(turns[0, :, 0], torch.stack(columns, dim=-1))


def test_of_a_large_table_a_token_slice_launches_a_few_kernels_for_all_frequencies() -> None:
    table, like = RotaryTable(rotation_of(128), 1 << 20), torch.zeros(1, device="meta")
    table.between(0, 2048, like)  # makes the frequencies
    with KernelCounter() as counter:
        table.between(1 << 19, (1 << 19) + 2048, like)
    # Positions and angles; of cosines and of sines the function, the factor and the copy. It was 449.
    assert counter.found.total() == 8, counter.found
