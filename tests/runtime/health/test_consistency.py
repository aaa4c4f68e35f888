"""Which copies of a state differ, by their hashes."""

from unittest.mock import patch

import pytest
import torch

from deepspeed_ext.runtime.health import consistency as tensor_hash
from deepspeed_ext.runtime.health.consistency import REPLICAS, compared, described, hashes


def test_equal_copies_do_not_differ() -> None:
    assert compared("weight 1.bias", REPLICAS, [0, 2, 4], [7, 7, 7]) is None


def test_the_copy_that_differs_from_most_is_named() -> None:
    found = compared("weight 1.bias", REPLICAS, [0, 2, 4], [7, 7, 9])
    assert found is not None
    assert (found.odd, found.others) == ((4,), (0, 2))
    assert str(found) == "weight 1.bias on rank 4 differs from that on ranks 0, 2 (replicas)"


def test_where_no_copy_has_a_majority_all_are_named() -> None:
    for hashed in ([7, 9], [7, 7, 9, 9]):
        ranks = list(range(len(hashed)))
        found = compared("weight 1.bias", REPLICAS, ranks, hashed)
        assert found is not None and found.odd == tuple(ranks) and found.others == ()
    assert str(found) == "weight 1.bias on ranks 0, 1, 2, 3 differs (replicas)"


def test_a_message_names_the_first_few_and_counts_the_rest() -> None:
    found = [compared(f"weight {number}", REPLICAS, [0, 1], [1, 2]) for number in range(5)]
    assert described([each for each in found if each]).endswith("weight 2 on ranks 0, 1 differs (replicas); and 2 more")


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


def test_a_tensor_of_many_pieces_is_told_from_one_with_two_pieces_swapped() -> None:
    tensor = torch.arange(10.0)
    with patch.object(tensor_hash, "_PIECE", 4):
        swapped = torch.cat([tensor[4:8], tensor[:4], tensor[8:]])
        assert len({hash_of(tensor), hash_of(swapped), hash_of(tensor[:9])}) == 3


def test_hashes_come_in_the_order_of_the_tensors() -> None:
    first, second = torch.ones(3), torch.zeros(0)
    assert hashes([first, second]).tolist() == [hash_of(first), 0]
