"""How a micro-batch is cut into token slices."""

import weakref

import pytest
import torch
from hypothesis import given

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.live_batch import Buffer
from deepspeed_ext.runtime.micro_batch import (
    detached,
    join_micro_batches,
    join_token_slices,
    split_along_sequence,
    to_device,
)
from tests.strategies import cuts

CUT = TokenSlices((3, 1, 2))


@given(cut=cuts())
def test_parts_make_up_the_whole(cut: TokenSlices) -> None:
    tokens = torch.arange(2 * cut.seq_length).reshape(2, cut.seq_length)
    parts = split_along_sequence((tokens, tokens + 1), cut)
    assert {part.inputs.untyped_storage().data_ptr() for part in parts} == {tokens.untyped_storage().data_ptr()}
    assert [part.labels for part in split_along_sequence((tokens, None), cut)] == [None] * len(cut)
    assert [part.inputs.shape[1] for part in parts] == list(cut.lengths)
    assert torch.equal(torch.cat([part.inputs for part in parts], dim=1), tokens)
    assert torch.equal(torch.cat([part.labels for part in parts], dim=1), tokens + 1)
    assert sum(part.loss_weight for part in parts) == pytest.approx(1.0)


def test_tuples_are_cut_tensor_by_tensor() -> None:
    tokens, wide, per_row, scalar = torch.zeros(2, 6), torch.ones(2, 6, 5), torch.arange(2), torch.tensor(3.0)
    parts = split_along_sequence(((tokens, wide, per_row, scalar), (tokens, (per_row, wide))), CUT)
    for part, length in zip(parts, CUT.lengths, strict=True):
        assert [tuple(tensor.shape) for tensor in part.inputs] == [(2, length), (2, length, 5), (2,), ()]
        assert torch.equal(part.inputs[2], per_row)
        assert part.labels[1][1].shape == (2, length, 5)


def test_dicts_are_cut_entry_by_entry() -> None:
    tokens, per_row = torch.arange(12).reshape(2, 6), torch.arange(2)
    data = {"tokens": tokens, "rows": per_row, "nested": [tokens, {"wide": torch.ones(2, 6, 5)}], "name": "words"}
    parts = split_along_sequence([data, {"targets": tokens, "none": None}], CUT)
    for part, (start, end) in zip(parts, CUT.bounds(), strict=True):
        assert torch.equal(part.inputs["tokens"], tokens[:, start:end])
        assert part.inputs["rows"] is per_row
        assert torch.equal(part.inputs["nested"][0], tokens[:, start:end])
        assert part.inputs["nested"][1]["wide"].shape == (2, end - start, 5)
        assert part.inputs["name"] == "words"
        assert torch.equal(part.labels["targets"], tokens[:, start:end])
        assert part.labels["none"] is None


@given(cut=cuts())
def test_joining_is_the_inverse_of_cutting(cut: TokenSlices) -> None:
    tokens, per_row = torch.arange(3 * cut.seq_length).reshape(3, -1), torch.arange(3)
    tree = (tokens, {"wide": tokens.unsqueeze(-1).expand(-1, -1, 2), "rows": per_row, "name": "words"})
    joined = join_token_slices([part.inputs for part in split_along_sequence((tree, tokens), cut)], cut)
    assert torch.equal(joined[0], tokens)
    assert torch.equal(joined[1]["wide"], tree[1]["wide"])
    assert joined[1]["rows"] is per_row
    assert joined[1]["name"] == "words"


def test_tensors_without_a_sequence_are_stacked() -> None:
    rows = [torch.full((2,), float(index)) for index in range(3)]
    assert join_token_slices(rows, CUT).tolist() == [[0.0, 1.0, 2.0]] * 2
    assert join_token_slices([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)], CUT).tolist() == [1.0, 2.0, 3.0]
    assert join_token_slices([torch.tensor(1.0)], TokenSlices((6,))).shape == ()


def test_micro_batches_are_joined_row_after_row() -> None:
    wholes = [
        (torch.zeros(2, 6), {"loss": torch.tensor(1.0), "task": "a"}),
        (torch.ones(3, 6), {"loss": torch.tensor(2.0), "task": "b"}),
    ]
    joined = join_micro_batches(wholes)
    assert joined[0].shape == (5, 6)
    assert joined[0].sum() == 18
    assert joined[1]["loss"].tolist() == [1.0, 2.0]
    assert joined[1]["task"] == ["a", "b"]
    assert join_micro_batches([{"task": "a"}, {"task": "a"}]) == {"task": "a"}


def test_trees_are_moved_and_detached_tensor_by_tensor() -> None:
    weight = torch.ones(2, requires_grad=True)
    tree = {"a": weight * 2, "b": (weight, "name"), "c": None}
    assert to_device(tree, torch.device("meta"))["b"][0].device.type == "meta"
    found = detached(tree)
    assert not found["a"].requires_grad
    assert not found["b"][0].requires_grad
    assert found["b"][1] == "name"
    assert found["a"].data_ptr() == tree["a"].data_ptr()


@pytest.mark.parametrize(
    ("inputs", "labels", "named"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 6), "inputs of shape (2, 5)"),
        (torch.zeros(2, 6), torch.zeros(2, 7), "labels of shape (2, 7)"),
        (torch.zeros(6), torch.zeros(2, 6), "inputs of shape (6,)"),
        ((torch.zeros(2, 7), torch.zeros(2, 6)), torch.zeros(2, 6), "inputs of shape (2, 7)"),
        ({"a": torch.zeros(2, 7), "b": torch.zeros(2)}, torch.zeros(2, 6), "inputs of shape (2, 7) and (2,)"),
        (torch.zeros(2, 6), {"a": torch.zeros(2, 5)}, "labels of shape (2, 5)"),
    ],
)
def test_another_sequence_length_is_refused(inputs, labels, named: str) -> None:
    with pytest.raises(UserError) as refused:
        split_along_sequence((inputs, labels), CUT)
    message = str(refused.value)
    assert message.startswith(named)
    assert "6 tokens of the token slices 3,1,2" in message
    assert "\n" not in message


@pytest.mark.parametrize("batch", [torch.zeros(2, 6), {"tokens": torch.zeros(2, 6)}, (torch.zeros(2, 6),)])
def test_a_batch_that_is_no_pair_is_refused(batch) -> None:
    with pytest.raises(UserError, match="micro-batches are pairs: yield \\(inputs, labels\\)"):
        split_along_sequence(batch, CUT)


def test_gradients_of_inputs_that_need_one_are_zeros_if_missing() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    (used * 5).sum().backward()
    found = Buffer(inputs=(used, torch.ones(4), unused)).take_gradients()
    assert [gradient.tolist() for gradient in found] == [[5, 5, 5], [0, 0]]


def test_a_buffer_that_waits_for_weight_gradients_keeps_no_inputs() -> None:
    buffer = Buffer(inputs=(torch.ones(3, requires_grad=True),), deferred_wgrads=[lambda: None])
    held = weakref.ref(buffer.inputs[0])
    buffer.take_gradients()
    assert held() is None and buffer.deferred_wgrads
