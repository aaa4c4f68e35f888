"""The model on a device that is not the host's, forward and backward: no tensor stays on the host.

The meta device represents an accelerator: it checks shapes, types and (but for look-ups) devices of operations, without
computing. Attention takes the kernel for CUDA.
"""

from typing import Any

import pytest
import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash
from deepspeed_ext.runtime.state import sequence_state
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.gpt import gpt_loss
from tests.model.configs import LLAMA, OF_FAMILIES, SEQ, model_config

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PACKED = Documents(((0, 5, 20), (0,)))
CASES: dict[str, tuple[dict[str, Any], Documents | None]] = {
    "gpt": ({}, None),
    "llama": (LLAMA, None),
    "packed gpt": ({}, PACKED),
    "packed llama": (LLAMA, PACKED),
    "dropout": (DROPOUT, None),
    "dropout, packed": (LLAMA | DROPOUT, PACKED),
    **{name: (OF_FAMILIES[name], None) for name in ("gptj_like", "qwen3_like", "olmo2_like")},
}


@pytest.mark.parametrize(("parts", "documents"), CASES.values(), ids=CASES)
def test_every_tensor_follows(
    parts: dict[str, Any], documents: Documents | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_state, "kernel_for", lambda *_, **more: CudaFlash())
    monkeypatch.setattr(sequence_state, "kernel_of_runs_for", lambda *_: CudaFlash())
    device, dtype, half = torch.device("meta"), torch.bfloat16, SEQ // 2
    model = WholeModel(model_config(**parts)).to(device, dtype)
    tokens = torch.zeros(2, SEQ, dtype=torch.int64, device=device)
    state = SequenceState(TokenSlices((half, half)), sequences=(1, 2), documents=documents)
    outputs = [model.output(tokens[:, index * half : (index + 1) * half], state, index) for index in range(2)]
    for each in reversed(outputs):
        assert (each.hidden.device, each.hidden.dtype) == (device, dtype)
        gpt_loss(each, (tokens[:, :half], torch.ones(2, half, device=device))).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert (weight.grad.device, weight.grad.dtype) == (device, dtype), name
