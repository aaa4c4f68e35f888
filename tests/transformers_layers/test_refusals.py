"""Which models of transformers are taken, by their structure, and how others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.transformers_layers import pipeline_layers
from tests.transformers_layers.models import model_of

HEAD_DIM = {"head_dim": 8}
CAPPED = HEAD_DIM | {"sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
"""A window shorter than the token slices that are compared, and soft caps that bend every score and logit."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", HEAD_DIM),
        ("mistral", {"sliding_window": None}),
        ("gpt_neox", {}),
        ("phi", {}),
        ("phi3", {"eos_token_id": 0}),
        ("olmo2", {"eos_token_id": 0}),
        ("starcoder2", {"eos_token_id": 0, "bos_token_id": 0}),
        ("gemma", HEAD_DIM),
        ("gemma2", CAPPED),
        ("gemma3_text", HEAD_DIM | {"sliding_window": 4}),
        ("smollm3", {"eos_token_id": 0, "bos_token_id": 0}),
    ],
)
def test_models_of_these_structures_are_taken(kind: str, settings: dict[str, Any]) -> None:
    assert len(pipeline_layers(model_of(kind, **settings))) >= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_precision_is_taken(dtype: torch.dtype) -> None:
    assert len(pipeline_layers(model_of("llama").to(dtype))) == 6


def t5() -> PreTrainedModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 97}
    return T5ForConditionalGeneration(T5Config(**sizes))


def checkpointed() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[0].gradient_checkpointing = True
    return model


class ScaledNorm(nn.LayerNorm):
    """Not what the plain model computes once the layers have been found."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) * self.calls


def limited() -> PreTrainedModel:
    """Its configuration says that logits are limited, and its layers, unlike those of Gemma, do not do so."""
    model = model_of("llama")
    model.config.final_logit_softcapping = 30.0
    return model


def miscounting() -> PreTrainedModel:
    model = model_of("gpt2")
    model.transformer.ln_f = ScaledNorm(32)
    return model


class Noise(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.5, self.training)


def noisy() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[1].mlp.act_fn = Noise()
    return model


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(2, 2), "Linear is no model of transformers"),
        (t5, "has an encoder or cross-attention"),
        (lambda: model_of("gpt2", add_cross_attention=True), "has an encoder or cross-attention"),
        (checkpointed, "gradient_checkpointing_disable"),
        (lambda: model_of("mixtral", output_router_logits=True), "config.output_router_logits = False"),
        (lambda: model_of("llama", rope_parameters=DYNAMIC_ROPE), "dynamic rotary embeddings"),
        (lambda: model_of("phi3", eos_token_id=0, rope_parameters=LONG_ROPE), "longrope rotary embeddings"),
        (lambda: model_of("bloom", eos_token_id=0), "is built in a way that is not known here"),
        (lambda: model_of("falcon", eos_token_id=0), "does not call its attention by transformers' AttentionInterface"),
        (lambda: model_of("stablelm", eos_token_id=0), "layers that keep `past` from it cannot be trained here"),
        (lambda: model_of("gpt_oss", **HEAD_DIM), "attends with s_aux"),
        (lambda: model_of("mamba"), "has layers of the type linear_attention"),
        (limited, "computes logits that its layers in token slices do not"),
        (miscounting, "computes logits that its layers in token slices do not"),
        (noisy, "draws random numbers in its layers"),
    ],
)
def test_others_are_refused_in_one_line(make: Callable[[], nn.Module], said: str) -> None:
    model = make()
    with pytest.raises(UserError) as refused:
        pipeline_layers(model)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    if isinstance(model, PreTrainedModel):
        assert model.config._attn_implementation != "token_slices"
