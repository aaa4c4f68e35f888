"""Bad numbers on CUDA: found in every dtype, held back by fused steps without a wait, and hashes as on the host."""

import pytest
import torch
from torch import nn

from deepspeed_ext.runtime.gradients.gradient_norm import skip_bad_update
from deepspeed_ext.runtime.health.states import are_finite, hashes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    tensors = []
    for bad in (None, float("nan"), float("inf"), -float("inf")):
        for place in (0, 31, 70_000, -1):
            tensor = torch.full((100_003,), torch.finfo(dtype).max, dtype=dtype, device="cuda")
            if bad is not None:
                tensor[place] = bad
            tensors.append(tensor)
    assert are_finite(tensors).tolist() == [True] * 4 + [False] * 12


def test_hashes_are_those_of_the_host() -> None:
    tensors = [torch.randn(size).to(dtype) for size in (5, 3_000_001) for dtype in (torch.float32, torch.bfloat16)]
    assert hashes([each.cuda() for each in tensors]).tolist() == hashes(tensors).tolist()


def test_a_fused_step_changes_nothing_if_the_norm_is_no_number_and_nobody_waits() -> None:
    weight = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for value in (1.0, float("nan"), 1.0):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, value)
        torch.cuda.set_sync_debug_mode("error")
        try:
            skip_bad_update(optimizer, torch.linalg.vector_norm(weight.grad))
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(weight, before) == (value != 1.0)
    assert optimizer.state[weight]["step"].item() == 2
