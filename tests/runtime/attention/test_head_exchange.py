"""Attention of sequence-parallel ranks equals attention written out over the whole sequence, gradients included."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.head_exchange import check_heads
from deepspeed_ext.runtime.topology import SequenceParallelRanks, own_group
from tests.distributed import run_distributed
from tests.pairs import covering_pairs
from tests.runtime.attention.test_windows import HEADS, ROWS, SIZE, Layer, worst_error

CUTS = ((24,), (8, 8, 8), (12, 4, 8))
STARTS = ((0, 3, 13), (0, 9, 16, 17))


@dataclass(frozen=True)
class Setup:
    """Two layers on ranks that share token slices."""

    num_ranks: int
    cut: tuple[int, ...]
    groups: int
    window: int | None
    packed: bool
    dropout: float
    softcap: float | None
    recompute: bool


_ALL = [
    Setup(*each)
    for each in product((2, 4), CUTS, (1, 2, 4), (None, 3, 9), (False, True), (0.0, 0.3), (None, 0.5), (False, True))
]
SETUPS = [_ALL[index] for index in covering_pairs([vars(each) for each in _ALL])]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Elements of each message of a head exchange inside."""
    sizes: list[int] = []
    exchange = dist.all_to_all_single

    def counting(received: Tensor, sent: Tensor, **keywords: object) -> None:
        sizes.append(sent.numel())
        exchange(received, sent, **keywords)

    with mock.patch.object(dist, "all_to_all_single", counting):
        yield sizes


def error_and_sizes(setup: Setup, ranks: SequenceParallelRanks) -> tuple[float, list[int]]:
    """Largest relative error of outputs and gradients, and the sizes of the messages."""
    torch.manual_seed(0)
    starts = STARTS if setup.packed else None
    layers = [Layer(number, setup.groups, setup.window, setup.softcap, setup.dropout, starts) for number in range(2)]
    with counted() as sizes:
        error = worst_error(layers, TokenSlices(setup.cut), starts, recompute=setup.recompute, ranks=ranks)
    return error, sizes


def _worst_errors() -> list[tuple[float, list[int]]]:
    rank = dist.get_rank()
    pairs, all_ranks = own_group([[0, 1], [2, 3]]), dist.group.WORLD
    ranks = {2: SequenceParallelRanks(rank % 2, 2, pairs), 4: SequenceParallelRanks(rank, 4, all_ranks)}
    return [error_and_sizes(setup, ranks[setup.num_ranks]) for setup in SETUPS]


def test_outputs_and_gradients_equal_attention_written_out_and_messages_are_no_larger_than_the_token_slice() -> None:
    for of_rank in run_distributed(_worst_errors, 4):
        for setup, (error, sizes) in zip(SETUPS, of_rank, strict=True):
            assert error <= 1e-12, setup
            # Forward and backward, twice the forward if recomputed; two layers; there and back.
            assert len(sizes) == len(setup.cut) * (3 if setup.recompute else 2) * 2 * 2, setup
            key_heads = max(setup.groups, setup.num_ranks)
            forward = [ROWS * length // setup.num_ranks * SIZE for length in setup.cut]
            assert set(sizes) == {tokens * heads for tokens in forward for heads in (HEADS, HEADS + 2 * key_heads)}
            assert max(sizes) <= ROWS * max(setup.cut) * SIZE * (HEADS + 2 * setup.groups)


def test_heads_that_ranks_can_and_cannot_share() -> None:
    for heads in ((8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 6, 3)):
        check_heads(*heads)
    for heads, line in (((6, 2, 4), "4 .* cannot share 6 attention heads"), ((12, 3, 4), "4 .* and 3 key heads")):
        with pytest.raises(UserError, match=line):
            check_heads(*heads)
