"""Dropout by position: masks follow the token, and look random."""

import pytest
import torch
from hypothesis import given

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace, dropout
from tests.runtime.attention.masks import attention_keep_mask, keep_mask
from tests.strategies import cuts

ROWS = (3, 11)


def place(start: int = 0, *, seed: int = 1, layer: int = 2, site: int = 1, sequences: tuple[int, ...] = ROWS):
    return DropoutPlace.at(seed, layer, site, sequences, start)


@given(cut=cuts())
def test_a_token_slice_drops_its_part_of_the_whole(cut: TokenSlices) -> None:
    ones = torch.ones(2, cut.seq_length, 8)
    whole = dropout(ones, 0.3, place())
    parts = [dropout(ones[:, start:end], 0.3, place(start)) for start, end in cut.bounds()]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_share_of_zeros_and_mean(probability: float) -> None:
    dropped = dropout(torch.ones(2, 512, 512), probability, place())
    # Six standard deviations of a mean over 2^19 draws.
    deviation = 6 * (probability * (1 - probability) / 2**19) ** 0.5
    assert (dropped == 0).double().mean().item() == pytest.approx(probability, abs=deviation)
    assert dropped[dropped != 0].unique().tolist() == [pytest.approx(1 / (1 - probability))]


def test_nothing_is_dropped_at_probability_0() -> None:
    ones = torch.ones(2, 4, 4)
    assert dropout(ones, 0.0, place()) is ones
    assert keep_mask(place().rows(4, ones.device), 0, 100, 0.0).all()


@pytest.mark.parametrize("dimension", ["tokens", "channels"])
def test_rows_and_columns_of_a_mask_are_independent(dimension: str) -> None:
    """Correlations between all pairs of 512 rows of 1,024 draws spread as those of independent ones do."""
    kept = keep_mask(place(sequences=(5,)).rows(1024, torch.device("cpu")), 0, 512, 0.1)[0].double()
    draws = (kept - 0.9) / 0.3
    matrix = draws.t() @ draws / 1024 if dimension == "channels" else draws @ draws.t() / 512
    others = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
    expected = (1 / 1024 if dimension == "channels" else 1 / 512) ** 0.5
    assert others.std().item() == pytest.approx(expected, rel=0.05)
    assert others.abs().max() < 8 * expected


@pytest.mark.parametrize(
    "other",
    [place(seed=2), place(layer=3), place(site=2), place(1), place(sequences=(4, 12))],
    ids=["seed", "layer", "site", "position", "sequence"],
)
def test_every_part_of_the_place_matters(other: DropoutPlace) -> None:
    """Masks of two places agree as often as two coins do."""
    masks = [keep_mask(each.rows(256, torch.device("cpu")), 0, 256, 0.5) for each in (place(), other)]
    assert (masks[0] == masks[1]).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_rows_of_a_micro_batch_differ_only_by_their_sequence() -> None:
    """The same sequence in another row, as under another micro-batch size, has the same mask."""
    rows, swapped = (place(sequences=order).rows(64, torch.device("cpu")) for order in (ROWS, ROWS[::-1]))
    assert torch.equal(rows, swapped.flip(0))
    assert not torch.equal(rows[0], rows[1])


def test_the_gradient_passes_where_the_value_did() -> None:
    inputs = torch.ones(2, 16, 8, dtype=torch.double, requires_grad=True)
    dropped = dropout(inputs, 0.4, place())
    dropped.sum().backward()
    assert torch.equal(inputs.grad, dropped.detach())


def test_heads_and_keys_of_attention_are_dropped_by_their_own_numbers() -> None:
    rows = place().rows(8, torch.device("cpu"))
    whole = attention_keep_mask(rows, 0, 4, 0, 64, 0.5)
    assert whole.shape == (2, 4, 8, 64)
    assert torch.equal(attention_keep_mask(rows, 2, 2, 16, 48, 0.5), whole[:, 2:, :, 16:])
    assert (whole[:, 0] == whole[:, 1]).double().mean().item() == pytest.approx(0.5, abs=0.1)
