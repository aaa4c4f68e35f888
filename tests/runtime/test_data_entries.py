"""Which entries of the data layers and the loss function take, and what does not fit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.attention.sequence_state import Past
from deepspeed_ext.runtime.data_entries import DataEntries, ForwardArguments
from tests.runtime import models
from tests.runtime.test_dict_batches import Gate, Start, weighted_loss


def unnamed(hidden: Tensor, *more: Tensor) -> Tensor:
    return hidden


def needs(hidden: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    return hidden


STAGES = [range(0, 1), range(1, 2)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            [LayerSpec(Start), LayerSpec(Gate)],
            "layer 1 (Gate) requires 'row_scale', which is no entry of the data ('tokens', 'mask'): yield it, or "
            "give the argument a default",
        ),
        (
            [LayerSpec(Gate), LayerSpec(Start)],
            "layer 0 (Gate) starts from 'hidden', which is no entry of the data ('tokens', 'mask'): name an entry like "
            "the first layer's first argument",
        ),
        (
            [LayerSpec(Start), unnamed],
            "layer 1 (unnamed) takes arguments without a name, which entries of the data cannot reach: name them",
        ),
    ],
)
def test_layers_that_entries_do_not_fit_are_refused_at_the_start(made: list[Any], message: str) -> None:
    names = ["tokens", "mask"]
    with pytest.raises(UserError) as declared:
        DataEntries(made, STAGES, declared=names)
    assert str(declared.value) == message
    with pytest.raises(UserError) as found:
        DataEntries(made, STAGES).check(dict.fromkeys(names), None, cutting_stages={0, 1})
    assert str(found.value) == message


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            weighted_loss,
            "the loss function requires 'targets', which is no entry of the labels ('target'): yield it, or give the "
            "argument a default",
        ),
        (
            unnamed,
            "the loss function takes arguments without a name, which entries of the labels cannot reach: name them",
        ),
        (nn.CrossEntropyLoss(), None),
    ],
)
def test_labels_are_held_against_the_loss_function(loss_fn: Callable[..., Any], message: str | None) -> None:
    entries = DataEntries([LayerSpec(Start)], STAGES[:1], loss_fn)
    if message is None:
        entries.check(torch.zeros(1), {"target": 1, "other": 2}, cutting_stages={0})
        assert entries.given_to_loss({"target": 1, "other": 2}) == {"target": 1}
        return
    with pytest.raises(UserError) as refused:
        entries.check(torch.zeros(1), {"target": 1}, cutting_stages={0})
    assert str(refused.value) == message


def test_a_tensor_cannot_feed_a_layer_that_requires_an_entry() -> None:
    with pytest.raises(UserError, match=r"layer 1 \(needs\) requires 'tokens', and the data is a Tensor: yield a dict"):
        DataEntries([LayerSpec(Start), needs], STAGES).check(torch.zeros(1), None, cutting_stages={0, 1})


def test_no_entry_is_called_past() -> None:
    with pytest.raises(UserError, match="the data has an entry 'past'"):
        DataEntries([LayerSpec(Start)], STAGES[:1], declared=["tokens", "past"])


# ---------------------------------------------------------------------- arguments


def all_of_them(hidden: Tensor, **entries: Tensor) -> Tensor:
    return hidden


def tied(shared: nn.Module, hidden: Tensor, mask: Tensor, *, past: Past, scale: float = 1.0) -> Tensor:
    return hidden


@pytest.mark.parametrize(
    ("layer", "first", "required", "optional", "past", "everything", "sequence"),
    [
        (LayerSpec(Start), "tokens", (), ("positions",), False, False, False),
        (LayerSpec(Gate), "hidden", ("mask", "row_scale"), (), True, False, False),
        (models.Block(), "hidden", (), (), True, False, False),
        (TiedLayerSpec("key", Start), "tokens", (), ("positions",), False, False, False),
        (TiedLayerSpec("key", Start, forward_fn=tied), "hidden", ("mask",), ("scale",), True, False, False),
        (unnamed, "hidden", (), (), False, False, True),
        (all_of_them, "hidden", (), (), False, True, False),
        (partial(needs, mask=torch.zeros(())), "hidden", ("tokens",), ("mask",), False, False, False),
        (torch.relu, None, (), (), False, False, False),
    ],
)
def test_arguments_of_layers(layer, first, required, optional, past, everything, sequence) -> None:
    found = ForwardArguments.of_layer(0, layer)
    assert (found.first, found.required, found.optional) == (first, required, optional)
    assert (found.takes_past, found.takes_all, found.takes_unnamed) == (past, everything, sequence)


def test_what_a_layer_takes_of_some_names() -> None:
    names = ["tokens", "mask", "hidden", "past", "scale"]
    assert ForwardArguments.of_layer(0, all_of_them).taken(names) == ("tokens", "mask", "scale")
    assert ForwardArguments.of_layer(0, needs).taken(names) == ("tokens", "mask")
    assert ForwardArguments.of_layer(0, TiedLayerSpec("key", Start, forward_fn=tied)).taken(names) == ("mask", "scale")
