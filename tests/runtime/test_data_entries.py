"""Entries that layers and the loss function take, and refusals of others."""

from functools import partial

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.micro_batch import DataEntries, ForwardArguments
from deepspeed_ext.runtime.state.sequence_state import Past
from tests.runtime import models
from tests.runtime.test_dict_batches import Gate, Start, weighted_loss


def unnamed(hidden: Tensor, *more: Tensor) -> Tensor:
    return hidden


def needs(hidden: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    return hidden


STAGES = [range(0, 1), range(1, 2)]
DATA, TARGET = {"tokens": None, "mask": None}, {"target": 1}
START = [LayerSpec(Start)]
REFUSED = {
    "missing": (
        [*START, LayerSpec(Gate)],
        DATA,
        "layer 1 (Gate) requires 'row_scale', ",
        "('tokens', 'mask'): yield",
    ),
    "no start": ([LayerSpec(Gate), *START], DATA, "layer 0 (Gate) starts from 'hidden', ", ": name an entry like "),
    "no name": ([*START, unnamed], DATA, "layer 1 (unnamed) takes arguments without a name", ": name them"),
    "called past": (START, {"tokens": None, "past": None}, "the data has an entry 'past'", ": rename it"),
    "a tensor": ([*START, needs], torch.zeros(1), "layer 1 (needs) requires 'tokens'", "is a Tensor: yield a dict"),
}
REFUSED_LABELS = {
    "missing": (weighted_loss, "the loss function requires 'targets', ", "the labels ('target'): yield it"),
    "no name": (unnamed, "the loss function takes arguments without a name", "of the labels cannot reach: name them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_entries_do_not_fit_are_refused(name: str) -> None:
    made, data, begins, remedy = REFUSED[name]
    stages = STAGES[: len(made)]
    with pytest.raises(UserError) as found:
        DataEntries(made, stages).check(data, None, cutting_stages={0, 1})
    line = str(found.value)
    assert line.startswith(begins) and remedy in line and "\n" not in line
    if isinstance(data, dict):
        with pytest.raises(UserError) as declared:
            DataEntries(made, stages, declared=list(data))
        assert str(declared.value) == line, "as soon as they are known"


@pytest.mark.parametrize("name", REFUSED_LABELS)
def test_labels_that_the_loss_function_cannot_take_are_refused(name: str) -> None:
    loss_fn, begins, remedy = REFUSED_LABELS[name]
    with pytest.raises(UserError) as refused:
        DataEntries(START, STAGES[:1], loss_fn).check(torch.zeros(1), TARGET, cutting_stages={0})
    assert str(refused.value).startswith(begins) and remedy in str(refused.value)


def test_labels_are_those_that_the_loss_function_takes() -> None:
    entries = DataEntries(START, STAGES[:1], nn.CrossEntropyLoss())
    entries.check(torch.zeros(1), {"target": 1, "other": 2}, cutting_stages={0})
    assert entries.given_to_loss({"target": 1, "other": 2}) == TARGET


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


def test_names_that_a_layer_takes() -> None:
    names = ["tokens", "mask", "hidden", "past", "scale"]
    assert ForwardArguments.of_layer(0, all_of_them).taken(names) == ("tokens", "mask", "scale")
    assert ForwardArguments.of_layer(0, needs).taken(names) == ("tokens", "mask")
    assert ForwardArguments.of_layer(0, TiedLayerSpec("key", Start, forward_fn=tied)).taken(names) == ("mask", "scale")
