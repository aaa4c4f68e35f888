"""Weights are drawn by place: the same whatever part is drawn, and normal."""

import pytest
import torch

from megatron_terapipe.model.initialization import normal, normal_blocks, philox
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

ONES = 0xFFFFFFFF
# The vectors of philox4x32 with 10 rounds in Random123's kat_vectors: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_words_are_philox(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    first, second, third, fourth = (torch.tensor([word]) for word in counter)
    drawn = philox((first, second, third, fourth), key[0] | key[1] << 32)
    assert tuple(int(word) for word in drawn) == words


def test_numbers_are_box_muller_of_the_words() -> None:
    blocks, key = torch.arange(5000) * 987_654_321, 0x299F31D0A4093822
    zero = torch.zeros_like(blocks)
    words = [word.double() for word in philox((blocks & ONES, blocks >> 32, zero, zero), key)]
    radii, expected = [], []
    for size, turn in (words[:2], words[2:]):
        radius = (-2 * ((size + 0.5) / 2**32).log()).sqrt()
        angle = (turn % 2**30 + 0.5) / 2**30 * torch.pi / 2
        signs = [1 - 2 * ((turn // 2**bit) % 2) for bit in (30, 31)]
        radii += [radius, radius]
        expected += [radius * angle.cos() * signs[0], radius * angle.sin() * signs[1]]
    drawn = normal_blocks(blocks, key)
    assert drawn.dtype == torch.float32
    # A logarithm has an error of float32's last digit, by which a radius is wrong the more the smaller it is.
    error = (drawn - torch.stack(expected, -1)).abs()
    assert (error < 1e-6 * (1 + 1 / torch.stack(radii, -1))).all()


def drawn(ranks: TensorParallelRanks, shape: tuple[int, ...], cut: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's part of a weight of the layer with seed 7, which draws another before."""
    torch.manual_seed(7)
    torch.set_default_dtype(dtype)
    try:
        ranks.parameter(6, 6, cut=0, initialize=normal(1.0))
        return ranks.parameter(*shape, cut=cut, initialize=normal(0.02)).data
    finally:
        torch.set_default_dtype(torch.float32)


CUTS = [
    ((48, 20), 0),
    ((20, 48), 1),
    ((5, 36), 1),  # parts that begin within a block of four numbers
    ((6, 42), 1),  # and rows that do, each elsewhere
    ((2, 12, 7), 1),
    ((36, 3751), 0),  # more than is drawn at a time
    ((3, 140_004), 1),
]


@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_parts_are_those_of_the_whole_to_the_bit(shape: tuple[int, ...], cut: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = drawn(TensorParallelRanks(), shape, cut, dtype)
        for size in (2, 3):
            if shape[cut] % size == 0:
                parts = [drawn(TensorParallelRanks(rank, size), shape, cut, dtype) for rank in range(size)]
                assert torch.equal(torch.cat(parts, cut), whole)


def test_more_rows_leave_the_others_as_they_were() -> None:
    some, more = (drawn(TensorParallelRanks(), (rows, 24), 0, torch.float32) for rows in (257, 384))
    assert torch.equal(more[:257], some)


def test_weights_of_a_layer_and_of_other_seeds_differ() -> None:
    sums = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        sums |= {TensorParallelRanks().parameter(8, 8, cut=0, initialize=normal(1.0)).sum().item() for _ in range(2)}
    assert len(sums) == 4


def test_the_meta_device_draws_no_numbers() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert TensorParallelRanks().parameter(8, 8, cut=0, initialize=normal(1.0)).is_meta
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_are_normal_and_independent() -> None:
    numbers = normal_blocks(torch.arange(1 << 19), 12345).double().flatten()
    count = numbers.numel()
    # Five standard errors of each moment: 1, 2, 15 and 96 are the variances of z, z^2 - 1, z^3 and z^4 - 3.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((numbers**power).mean() - moment) < 5 * (variance / count) ** 0.5
    # The largest difference to the normal distribution is below 1.95 / sqrt(n) with probability 0.999.
    expected = torch.special.ndtr(numbers.sort().values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    assert max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) < 1.95 / count**0.5
    # The tails, beyond 3, 4 and 4.5.
    for bound in (3.0, 4.0, 4.5):
        wanted = 2 * float(torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64))) * count
        assert abs(int((numbers.abs() > bound).sum()) - wanted) < 5 * wanted**0.5
    # Neighbours, those of a block among them, and blocks of neighbouring keys: numbers and their squares.
    other = normal_blocks(torch.arange(1 << 19), 12346).double().flatten()
    for left, right in [*((numbers[:-step], numbers[step:]) for step in (1, 2, 3, 4, 8, 1024)), (numbers, other)]:
        assert abs((left * right).mean()) < 5 / left.numel() ** 0.5
        assert abs(((left**2 - 1) * (right**2 - 1)).mean()) < 5 * 2 / left.numel() ** 0.5
    within = numbers.view(-1, 4).T.cov()
    assert (within - torch.eye(4, dtype=torch.float64)).abs().max() < 5 * (2 / (count / 4)) ** 0.5
