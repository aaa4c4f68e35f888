"""What a rank holds of a batch, and until when."""

import weakref

import torch

from deepspeed_ext.runtime.live_batch import Buffer


def test_gradients_are_those_of_the_inputs_that_want_one_and_zeros_where_nothing_came() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    (used * 5).sum().backward()
    found = Buffer(inputs=(used, torch.ones(4), unused)).take_gradients()
    assert [gradient.tolist() for gradient in found] == [[5, 5, 5], [0, 0]]


def test_a_buffer_that_waits_for_weight_gradients_keeps_no_inputs() -> None:
    buffer = Buffer(inputs=(torch.ones(3, requires_grad=True),), deferred_wgrads=[lambda: None])
    held = weakref.ref(buffer.inputs[0])
    buffer.take_gradients()
    assert held() is None and buffer.deferred_wgrads
