"""How a micro-batch is cut into token slices."""

import pytest
import torch
from hypothesis import given

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batch import split_along_sequence
from tests.strategies import cuts

CUT = TokenSlices((3, 1, 2))


@given(cut=cuts())
def test_parts_make_up_the_whole(cut: TokenSlices) -> None:
    tokens = torch.arange(2 * cut.seq_length).reshape(2, cut.seq_length)
    parts = split_along_sequence((tokens, tokens + 1), cut)
    assert [part.inputs.shape[1] for part in parts] == list(cut.lengths)
    assert torch.equal(torch.cat([part.inputs for part in parts], dim=1), tokens)
    assert torch.equal(torch.cat([part.labels for part in parts], dim=1), tokens + 1)
    assert sum(part.loss_weight for part in parts) == pytest.approx(1.0)


@given(cut=cuts())
def test_weighted_means_of_parts_are_the_mean_of_the_whole(cut: TokenSlices) -> None:
    values = torch.arange(2.0 * cut.seq_length, dtype=torch.float64).reshape(2, cut.seq_length)
    parts = split_along_sequence((values, values), cut)
    mean = sum(part.labels.mean() * part.loss_weight for part in parts)
    assert float(mean) == pytest.approx(float(values.mean()))


def test_tuples_are_cut_tensor_by_tensor_and_what_has_no_sequence_goes_whole() -> None:
    tokens, wide, per_row, scalar = torch.zeros(2, 6), torch.ones(2, 6, 5), torch.arange(2), torch.tensor(3.0)
    parts = split_along_sequence(((tokens, wide, per_row, scalar), (tokens, (per_row, wide))), CUT)
    for part, length in zip(parts, CUT.lengths, strict=True):
        assert [tuple(tensor.shape) for tensor in part.inputs] == [(2, length), (2, length, 5), (2,), ()]
        assert torch.equal(part.inputs[2], per_row)
        assert part.labels[1][1].shape == (2, length, 5)


def test_parts_are_views() -> None:
    tokens = torch.zeros(2, 6)
    parts = split_along_sequence((tokens, tokens), CUT)
    assert {part.inputs.untyped_storage().data_ptr() for part in parts} == {tokens.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("inputs", "labels", "named"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 6), "inputs of shape (2, 5)"),
        (torch.zeros(2, 6), torch.zeros(2, 7), "labels of shape (2, 7)"),
        (torch.zeros(6), torch.zeros(2, 6), "inputs of shape (6,)"),
        ((torch.zeros(2, 7), torch.zeros(2, 6)), torch.zeros(2, 6), "inputs of shape (2, 7)"),
    ],
)
def test_another_sequence_length_is_refused(inputs, labels, named: str) -> None:
    with pytest.raises(UserError) as refused:
        split_along_sequence((inputs, labels), CUT)
    message = str(refused.value)
    assert message.startswith(named)
    assert "6 tokens of the token slices 3,1,2" in message
    assert "\n" not in message
