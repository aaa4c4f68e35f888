"""The formula of activation bytes against what autograd really keeps."""

import pytest
import torch

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model import flops
from megatron_terapipe.model.block import TransformerBlock
from tests.model.configs import SEQ, model_config

ROWS = 2
SHAPES = {
    "plain": model_config(hidden_size=128),
    "grouped": model_config(hidden_size=128, num_key_value_heads=1),
    "narrow_mlp": model_config(hidden_size=128, ffn_hidden_size=64),
    "wide_heads": model_config(hidden_size=128, kv_channels=96, num_key_value_heads=2),
}


def kept_bytes(model: ModelConfig, dtype: torch.dtype, cut: tuple[int, ...]) -> int:
    """Bytes of the storages that the backward of a block will read, keys and values included, parameters not."""
    block = TransformerBlock(model).to(dtype)
    state = SequenceState(TokenSlices(cut))
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hidden = torch.randn(ROWS, SEQ, model.hidden_size, dtype=dtype, requires_grad=True)
    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for index, (start, end) in enumerate(state.token_slices.bounds()):
            # Each token slice arrives in a tensor of its own, as from the stage before.
            received = hidden[:, start:end].detach().clone().requires_grad_()
            outputs.append(block(received, state.past(0, index)))
    for tensor in state.past(0, 0)._state.read(SEQ):
        keep(tensor)
    for parameter in block.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("cut", [(SEQ,), (20, 12)], ids=["whole", "token_slices"])
@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_formula_equals_what_autograd_keeps(
    model: ModelConfig, dtype: torch.dtype, element_bytes: int, cut: tuple[int, ...]
) -> None:
    formula = ROWS * SEQ * flops.block_activation_bytes_per_token(model, element_bytes)
    # What the formula leaves out: a mean and a deviation for each of the two LayerNorms.
    norms = ROWS * SEQ * 4 * element_bytes
    assert kept_bytes(model, dtype, cut) == formula + norms
    assert norms < 0.05 * formula
