"""Kernels of a transformer layer and token slice, forward and backward: what a device would be told to launch.

    python -m benchmarks.kernel_counts [--eager]

Counted is one token slice in the middle of a sequence, weights with gradients of earlier ones to add to, in bf16 with
the attention kernel for CUDA: operators that compute, without views and allocations. The layer runs on the meta device,
which needs no GPU. Where a pointwise function is compiled, its kernels are the loops that torch's compiler leaves after
fusion, which it does for CPUs and GPUs alike; with `--eager` its operators are counted.

The last column is for gradients that add up in fp32: those of norms and biases are then left as they are, and added for
all layers of a stage in one call, which no layer is charged for.
"""

import argparse
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measuring.counters import counting
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import CudaFlash, sequence_state
from deepspeed_ext.runtime.attention.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

SIZES = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 256}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 192,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": LLAMA,
    "GPT, dropout of hidden states": {"hidden_dropout": 0.1},
    "GPT, dropout of attention, too": DROPOUT,
}


def kernels(model: ModelConfig, *, compiled: bool, apart: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Kernels of one layer and token slice, forward and backward, by name.

    Args:
        model: the model, of which the first layer is counted.
        apart: gradients of norms and biases are not added to earlier ones here.
    """
    length, device = model.seq_length // 4, torch.device("meta")
    layer = TransformerBlock(model, model.blocks[0], TensorParallelRanks()).to(device, torch.bfloat16)
    state = SequenceState(TokenSlices((length,) * 4), sequences=range(2))
    outputs, forwards, backwards = [], [], []
    with patch.object(sequence_state, "kernel_for", lambda *_: CudaFlash()):
        for token_slice in range(4):
            hidden = torch.zeros(2, length, model.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
            with counting(compiled=compiled and token_slice == 2) as counter:
                outputs.append(layer(hidden, state.past(0, token_slice)))
            forwards.append(counter.found)
        for token_slice, output in reversed(list(enumerate(outputs))):
            gradient = torch.zeros_like(output)
            for parameter in layer.parameters():
                if apart and parameter.dim() == 1:
                    parameter.grad = None
            with counting(compiled=compiled and token_slice == 2) as counter:
                torch.autograd.backward(output, gradient)
            backwards.insert(0, counter.found)
    return forwards[2], backwards[2]


def main() -> None:
    """Print the table, and what each number is made of."""
    parser = argparse.ArgumentParser(description="Kernels of a layer and token slice.")
    parser.add_argument("--eager", action="store_true", help="count pointwise functions by their operators")
    compiled = not parser.parse_args().eager
    print("| layer | forward | backward | backward, sums in fp32 |\n|---|---|---|---|")
    details = []
    for name, parts in MODELS.items():
        model = ModelConfig(**SIZES, **parts)
        found = kernels(model, compiled=compiled)
        _, apart = kernels(model, compiled=compiled, apart=True)
        print(f"| {name} | {found[0].total()} | {found[1].total()} | {apart.total()} |")
        details += [f"{name}, {way}: {dict(each)}" for way, each in zip(("forward", "backward"), found, strict=True)]
    print(*("", *details), sep="\n")


if __name__ == "__main__":
    main()
