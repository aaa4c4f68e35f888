"""States that a layer carries from token slice to token slice: refusals, documents, and when they are freed.

Gradients are compared with plain autograd in `test_engine_equivalence.py`.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks

CUT = (3, 1, 4)
ZEROS = torch.zeros(2, 3)

Forward = Callable[[Past], object]


def nothing(past: Past) -> None:
    pass


def reads(initial: Tensor = ZEROS) -> Forward:
    return lambda past: past.carried("h", initial)


def leaves(state: Tensor = ZEROS) -> Forward:
    return lambda past: past.carry("h", state)


def changed_in_place(past: Past) -> None:
    state = torch.zeros(2, 3)
    past.carry("h", state)
    state += 1


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (nothing, reads(), "layer 4 reads the state 'h', and its forward of token slice 0 left none: call past.carry"),
        (leaves(), reads(torch.zeros(2, 4)), "as [2, 3] float32 on cpu, and its initial value is [2, 4] float32"),
        (leaves(ZEROS.double()), reads(), "as [2, 3] float64 on cpu, and its initial value is [2, 3] float32 on cpu"),
        (leaves(), reads(torch.zeros(2, 3, device="meta")), "and its initial value is [2, 3] float32 on meta: give"),
        (changed_in_place, reads(), "the state 'h' of layer 4 was changed in place after past.carry: change a copy"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit(first: Forward, second: Forward, line: str) -> None:
    state = SequenceState(TokenSlices(CUT))
    first(state.past(4, 0))
    with pytest.raises(UserError) as refused:
        second(state.past(4, 1))
    assert line in str(refused.value)


def test_ranks_that_share_a_token_slice_need_all_of_its_tokens() -> None:
    """Of a part of the tokens a layer would compute another state, and train another model unseen."""
    cut, alone = TokenSlices((4, 4)), SequenceParallelRanks()
    for ranks, refused in ((alone, False), (SequenceParallelRanks(1, 2), True)):
        past = SequenceState(cut, ranks=ranks).past(4, 0)
        with pytest.raises(UserError, match=r"layer 4 reads its state 'h' with a part") if refused else nullcontext():
            past.carried("h", ZEROS)
        with pytest.raises(Exception, match="heads") if refused else nullcontext():
            past.all_tokens(torch.zeros(1, 2, 3, 1))  # three heads for two ranks
        past.carried("h", ZEROS)


@pytest.mark.parametrize(
    ("first", "again", "line"),
    [
        (nothing, leaves(), "layer 4 left none as its state 'h', and leaves [2, 3] float32 on cpu when it is"),
        (leaves(), nothing, "left [2, 3] float32 on cpu as its state 'h', and leaves none when it is computed"),
        (leaves(), leaves(torch.zeros(1)), "and leaves [1] float32 on cpu when it is computed again: compute"),
    ],
)  # fmt: skip
def test_layers_that_are_computed_again_otherwise(first: Forward, again: Forward, line: str) -> None:
    state = SequenceState(TokenSlices(CUT))
    with torch.no_grad():
        first(state.past(4, 0))
    state.carried.bears_gradients = True
    with pytest.raises(UserError) as refused:
        again(state.past(4, 0))
        list(state.carried.roots(0))
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("documents", "begins"),
    [
        (None, None),
        (Documents(((0, 3), (0, 2)), attend_apart=False), None),
        (Documents(((0, 4, 7), (0,))), [[True, False, False, False, True, False, False, True], [True] + [False] * 7]),
    ],
)
def test_begins_of_documents(documents: Documents | None, begins: list[list[bool]] | None) -> None:
    state = SequenceState(TokenSlices(CUT), documents=documents)
    found = [state.past(0, number).begins() for number in range(len(CUT))]
    assert found == [None] * len(CUT) if begins is None else torch.cat(found, dim=1).tolist() == begins


def test_forward_only_keeps_the_last_state() -> None:
    state, kept = SequenceState(TokenSlices(CUT), forward_only=True), []
    for number in range(len(CUT)):
        past = state.past(0, number)
        left = past.carried("h", ZEROS) + 1
        kept.append(weakref.ref(left.untyped_storage()))
        past.carry("h", left)
        del left
    gc.collect()
    assert [each() is not None for each in kept] == [False, True, False]


def test_a_part_of_a_tensor_does_not_keep_all_of_it() -> None:
    state, window = SequenceState(TokenSlices(CUT)), torch.ones(2, 100)
    state.past(0, 0).carry("h", window[:, -3:])
    assert state.past(0, 1).carried("h", ZEROS).untyped_storage().nbytes() == ZEROS.nbytes


def test_a_state_that_bears_no_gradient_gives_its_readers_none() -> None:
    state = SequenceState(TokenSlices(CUT))
    state.past(0, 0).carry("h", ZEROS)
    state.past(0, 0).carry("number", torch.tensor([7]))
    assert not state.past(0, 1).carried("h", ZEROS).requires_grad
    assert state.past(0, 1).carried("number", torch.tensor([0])) == 7


def test_gradients_are_freed_as_backwards_take_them() -> None:
    """A state is a product of a weight with the state before: h_i = w h_(i-1), h_0 = w."""
    weight = torch.tensor(3.0, requires_grad=True)
    state, outputs = SequenceState(TokenSlices(CUT)), []
    for number in range(len(CUT)):
        past = state.past(0, number)
        outputs.append(weight * past.carried("h", torch.ones(())))
        past.carry("h", outputs[-1])
    for number in reversed(range(len(CUT))):
        roots, gradients = [outputs.pop()], [torch.ones(())]
        for edge, gradient in state.carried.roots(number):
            roots, gradients = [*roots, edge], [*gradients, gradient]
        torch.autograd.backward(roots, gradients)
    assert weight.grad == 1 + 2 * 3 + 3 * 9
    assert not state.carried._left.keys() & set(range(len(CUT)))
