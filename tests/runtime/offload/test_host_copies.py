"""Host buffers, and copies to them and back, on a CPU."""

import weakref

import torch

from deepspeed_ext.runtime.offload import HostBuffers, HostCopies

CPU = torch.device("cpu")


def test_tensors_come_back_as_they_were_and_are_gone_in_between() -> None:
    copies = HostCopies(CPU)
    tensors = [torch.randn(3, 4, requires_grad=True), torch.arange(6).view(2, 3).t(), torch.randn(0, 2)]
    values = [tensor.detach().clone() for tensor in tensors]
    held = weakref.ref(tensors[0].untyped_storage())
    copy = copies.offload(tensors)
    assert tensors[0].sum() == values[0].sum(), "others may read them until they are dropped"
    del tensors
    copies.drop(copy)
    assert held() is None
    copies.fetch(copy)
    back = copies.arrive(copy)
    assert all(torch.equal(one, other) for one, other in zip(back, values, strict=True))
    assert [tensor.requires_grad for tensor in back] == [True, False, False] and back[0].is_leaf
    assert copies.buffers.in_use == 0


def test_buffers_are_used_again_and_never_more_than_were_in_use_at_once() -> None:
    buffers = HostBuffers(CPU)
    long, short = torch.empty(100, dtype=torch.float64), torch.empty(50, dtype=torch.float64)
    first = buffers.take(long)
    place = first.data_ptr()
    buffers.give_back(first)
    # Of another shape and type, and as many bytes.
    again = buffers.take(torch.empty(20, 10, dtype=torch.float32))
    assert again.data_ptr() == place and (again.shape, again.dtype) == ((20, 10), torch.float32)
    buffers.give_back(again)
    two = [buffers.take(short), buffers.take(short)]
    assert (buffers.held, buffers.in_use, buffers.most_in_use) == (800, 800, 800)
    third = buffers.take(long)
    assert (buffers.held, buffers.in_use, buffers.most_in_use) == (1600, 1600, 1600)
    for buffer in (*two, third):
        buffers.give_back(buffer)
    assert (buffers.held, buffers.in_use) == (1600, 0)


def test_a_copy_can_be_abandoned_wherever_it_is() -> None:
    copies = HostCopies(CPU)
    for steps in ((), (copies.drop,), (copies.drop, copies.fetch)):
        copy = copies.offload([torch.randn(4)])
        for step in steps:
            step(copy)
        copies.abandon(copy)
        assert (copies.buffers.in_use, copy.on_device, copy.on_host) == (0, [], [])
