"""States with bad numbers and copies that differ are found and named, and no others."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from deepspeed_ext.runtime.health import states
from deepspeed_ext.runtime.health.states import (
    MASTER,
    REPLICAS,
    WEIGHT,
    State,
    compared,
    described,
    hashes,
    not_finite,
)


def state(kind: str, *values: float, dtype: torch.dtype = torch.float32) -> State:
    return State("2.mlp.up.weight", nn.Parameter(torch.zeros(1)), kind, torch.tensor(values, dtype=dtype))


def test_nan_and_both_infinities_are_found() -> None:
    bad = [state(WEIGHT, 1.0, value) for value in (float("nan"), float("inf"), -float("inf"))]
    given = [state(WEIGHT, 1.0, 2.0), *bad, state("exp_avg", 0.0)]
    assert not_finite((each, each.values) for each in given) == bad


def test_the_largest_numbers_of_each_dtype_are_numbers() -> None:
    largest = [
        state(WEIGHT, *[torch.finfo(dtype).max] * 9, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ]
    assert not_finite((each, each.values) for each in (*largest, state(MASTER))) == []


def test_texts_of_states() -> None:
    assert str(state(WEIGHT)) == "weight 2.mlp.up.weight"
    assert str(state("exp_avg")) == "exp_avg of 2.mlp.up.weight"
    assert described(["one"]) == "one"
    assert described(list("abcde")) == "a, b, c, and 2 more"


@pytest.mark.parametrize(
    ("hashed", "text"),
    [
        ([7, 7, 7], None),
        ([7, 7, 9], "weight 1.bias on rank 2 differs from that on ranks 0, 1 (replicas)"),
        ([7, 9], "weight 1.bias on ranks 0, 1 differs (replicas)"),
        ([7, 7, 9, 9], "weight 1.bias on ranks 0, 1, 2, 3 differs (replicas)"),
    ],
)
def test_copies_that_differ_from_most_are_named(hashed: list[int], text: str | None) -> None:
    assert compared("weight 1.bias", REPLICAS, range(len(hashed)), hashed) == text


WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def hash_of(tensor: torch.Tensor) -> int:
    return int(hashes([tensor])[0])


@pytest.mark.parametrize("dtype", WORDS)
def test_each_flipped_bit_of_each_element_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.randn(11, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {hash_of(tensor)}
    bits = 8 * tensor.element_size()
    for element in range(11):
        for bit in range(bits):
            flipped = tensor.clone()
            flipped.view(WORDS[dtype])[element] ^= torch.tensor(1).to(WORDS[dtype]) << bit
            found.add(hash_of(flipped))
    assert len(found) == 1 + 11 * bits


def test_order_and_the_sign_of_zero_count_and_the_shape_does_not() -> None:
    tensor = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert hash_of(tensor) == hash_of(tensor.flatten()) == hash_of(tensor.clone())
    assert hash_of(tensor) != hash_of(tensor.T)
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


def test_the_order_of_pieces_changes_the_hash() -> None:
    tensor = torch.arange(10.0)
    with patch.object(states, "_PIECE", 4):
        swapped = torch.cat([tensor[4:8], tensor[:4], tensor[8:]])
        assert len({hash_of(tensor), hash_of(swapped), hash_of(tensor[:9])}) == 3


def test_hashes_come_in_the_order_of_the_tensors() -> None:
    first, second = torch.ones(3), torch.zeros(0)
    assert hashes([first, second]).tolist() == [hash_of(first), 0]
