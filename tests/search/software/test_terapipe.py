"""The description of this trainer is what its modules do: kernels exactly, bytes to the digits that it gives."""

from dataclasses import fields
from functools import cache

import pytest

from benchmarks import operator_counts
from benchmarks.kernel_counts import LLAMA, SIZES, kernels
from benchmarks.operator_counts import Both
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.software.description import Operator, Operators
from megatron_terapipe.search.software.terapipe import TERAPIPE

SMALL = 0.12
"""Bytes for each number that are left out or rounded: one in fp32 for each row of a norm, weights, tables of angles. A
cast that is added moves 6, a kernel that is not fused at least 4."""


@cache
def counted() -> dict[str, Both]:
    return operator_counts.operators()


def described(operator: Operator) -> list[tuple[float, float]]:
    """Kernels and bytes of both directions, in half precision."""
    return [
        (operator.forward_kernels, operator.bytes_forward(2)),
        (operator.backward_kernels, operator.bytes_backward(2)),
    ]


@pytest.mark.parametrize("name", [field.name for field in fields(Operators)])
def test_operators_launch_and_move_what_is_described(name: str) -> None:
    found = [(each.kernels, 2 * each.numbers + each.other_bytes) for each in counted()[name]]
    for (num_kernels, num_bytes), (kernels_described, bytes_described) in zip(
        found, described(getattr(TERAPIPE.operators, name)), strict=True
    ):
        assert num_kernels == kernels_described
        assert num_bytes == pytest.approx(bytes_described, abs=SMALL)


def test_products_add_to_their_sums_and_launch_nothing_beside() -> None:
    products = TERAPIPE.products
    forward, backward = operator_counts.product()
    assert (forward.products, backward.products) == (products.forward_kernels, products.backward_kernels)
    assert products.accumulates_in_place
    assert (forward.kernels, backward.kernels, backward.numbers, backward.other_bytes) == (0, 0, 0, 0)


def test_gradients_of_keys_before_a_token_slice_are_added_up() -> None:
    found, prefix = operator_counts.prefix(), TERAPIPE.attention.prefix
    assert (found.kernels, found.numbers, found.other_bytes) == (0, prefix.backward, prefix.backward_bytes)


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["GPT", "Llama"])
def test_operators_make_up_a_layer(model: dict[str, object]) -> None:
    """What a layer launches is the sum of its operators: none is forgotten."""
    software, llama = TERAPIPE, bool(model)
    operators, attention = software.operators, software.attention
    norm = operators.rmsnorm if llama else operators.layernorm
    parts = [norm, norm, operators.residual, operators.residual, operators.heads]
    parts += [operators.rotary, operators.gated_activation] if llama else [operators.activation, *[operators.bias] * 4]
    forward, backward = kernels(ModelConfig(**SIZES, **model), compiled=True, apart=True)
    beside = 4 * software.products.forward_kernels + attention.forward_kernels
    assert forward.total() == sum(part.forward_kernels for part in parts) + beside
    beside = 4 * software.products.backward_kernels + attention.backward_kernels
    assert backward.total() == sum(part.backward_kernels for part in parts) + beside
