"""Host copies on CUDA: exact beside ops that use the memory again, and nothing waits for the host."""

import pytest
import torch

from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.runtime.offload import SLAB_BYTES, HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 1 << 22


def test_tensors_come_back_as_they_were_while_their_memory_is_used_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = HostCopies(device)
    factor = torch.randn(2048, 2048, device=device)
    expected, back = [], []
    # Page-locked memory is found by the first round; then the host waits for nothing.
    for turn in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            names = [(Content.INPUT, 0, 0, number) for number in range(4)]
            for number, name in enumerate(names):
                values = torch.full((SIZE,), float(number + turn), device=device)
                for _ in range(8):
                    factor = factor @ factor
                    factor = factor / factor.norm()
                expected.append(float(number + turn))
                copies.offload(name, [values])
                del values
            for name in names:
                copies.drop(name)
                # Written where the dropped tensor was, if the allocator may give that memory away.
                torch.full((SIZE,), -1.0, device=device)
            for name in names:
                copies.fetch(name)
            back += [copies.arrive(name)[0] * 1 for name in names]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for values, value in zip(back, expected, strict=True):
        assert bool((values == value).all())
    assert copies.pages.most_in_use == 4 * SIZE * 4 <= copies.pages.held < 4 * SIZE * 4 + SLAB_BYTES


def test_dropped_memory_is_free_at_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = HostCopies(device)
    name = (Content.INPUT, 0, 0, 0)
    copies.offload(name, [torch.ones(SIZE, device=device)])
    before = torch.cuda.memory_allocated(device)
    copies.drop(name)
    assert before - torch.cuda.memory_allocated(device) >= SIZE * 4
    copies.finish()
