"""Small models of transformers, their batches, and what plain autograd makes of them."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.runtime.training import as_numpy

VOCAB, SEQ, ROWS = 97, 24, 2
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "pad_token_id": None,
}
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE | {"tie_word_embeddings": True},
    "gpt2": GPT2 | NO_DROPOUT,
    # Windows, alternating, soft caps of scores and logits, and norms of queries and keys.
    "mistral": LLAMA_LIKE | {"sliding_window": 7},
    "gemma2": LLAMA_LIKE | {"sliding_window": 7, "head_dim": 8, "query_pre_attn_scalar": 8},
    "qwen3": LLAMA_LIKE | {"head_dim": 8},
}


def model_of(kind: str, **settings: Any) -> PreTrainedModel:
    """A model whose weights and biases are all random."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SETTINGS.get(kind, LLAMA_LIKE) | settings)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def batches(count: int = 2, *, step: int = 0, seq: int = SEQ) -> list[dict[str, torch.Tensor]]:
    """Micro-batches as a data loader yields them: padded on the right, labels equal to tokens."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for micro_batch in range(count):
        tokens = torch.randint(0, VOCAB, (ROWS, seq), generator=generator)
        mask = (torch.arange(seq) < torch.tensor([[seq], [seq - 7 - micro_batch]])).long()
        labels = tokens.masked_fill(mask == 0, -100)
        labels[0, 3:6] = -100
        found.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return found


def plain_gradients(model: PreTrainedModel) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients in fp64, by transformers' own forward and autograd."""
    model = deepcopy(model).double()
    losses = []
    for batch in batches():
        if model.config._attn_implementation == "eager":
            # It would make padding whose window holds nothing but padding NaN. Tokens that count do not see padding.
            del batch["attention_mask"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        # transformers computes its loss in fp32.
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()))
        assert losses[-1].item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    loss = sum(losses) / len(losses)
    loss.backward()
    return loss.item(), {name: as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
