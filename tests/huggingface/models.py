"""Models to convert, and their logits."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.inference import WholeModel
from tests.inference.checkpoints import checkpoint_info, write_info, write_manifest

COMMON: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "seq_length": 32,
    "max_position_embeddings": 40,
    "vocab_size": 257,
    # Large weights, so that every one of them counts in the logits.
    "init_method_std": 0.1,
}
LLAMA: dict[str, Any] = COMMON | {
    "num_key_value_heads": 2,
    "ffn_hidden_size": 80,
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 5000.0,
}
MODELS: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(**COMMON),
    "llama": ModelConfig(**LLAMA),
    "llama-one-group": ModelConfig(**LLAMA | {"num_key_value_heads": 1}),
}


GEMMA2 = ModelConfig(
    **LLAMA
    | {
        **{"untie_embeddings_and_output_weights": False, "apply_layernorm_1p": True, "norm_placement": "both"},
        **{"activation": "geglu", "embedding_multiplier": 48**0.5, "attention_softcap": 2.0, "logit_softcap": 9.0},
    }
)
"""One without windows."""


def whole_model(model: ModelConfig) -> WholeModel:
    """A model of which no bias and no norm is as it starts."""
    whole = WholeModel(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() == 1 or parameter.shape[0] == 2:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return whole


def save(whole: WholeModel, model: ModelConfig, checkpoints: Path, *, tensor_parallel_size: int = 1) -> Path:
    """Save it as a run does; returns the checkpoint's directory."""
    directory = checkpoints / "global_step7"
    layout = asdict(ParallelLayout(tensor_parallel_size=tensor_parallel_size))
    info = checkpoint_info(model, 7)
    write_info(replace(info, layout=layout, optimizer=None, partitioned=False, tokenizer={}), directory)
    for index, layer in whole.layers.items():
        for rank in range(tensor_parallel_size):
            weights = {
                name: _part(parameter, rank, tensor_parallel_size) for name, parameter in layer.named_parameters()
            }
            torch.save(weights, directory / layer_file(int(index), rank))
    (checkpoints / "latest").write_text(directory.name)
    write_manifest(directory)
    return directory


@torch.no_grad()
def logits(whole: WholeModel, tokens: Tensor) -> Tensor:
    return whole(tokens, SequenceState(TokenSlices((tokens.shape[1],))))


def _part(parameter: torch.nn.Parameter, rank: int, size: int) -> Tensor:
    cut = getattr(parameter, "partition_dim", None)
    weight = parameter.detach()
    return weight.clone() if cut is None else weight.tensor_split(size, dim=cut)[rank].clone()
