"""Whole models on several ranks against one rank alone: loss and every gradient."""

from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.sequence_state import SequenceState
from deepspeed_ext.runtime.module import takes_past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss
from megatron_terapipe.model.logits import Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import OF_FAMILIES, llama_config, model_config, uneven_layers
from tests.tensor_parallel.whole_and_parts import ALONE, assert_gradients, complete_gradients

CUT = (12, 4, 16)
DROPPED = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
UNEVEN = uneven_layers({"attention": {"no_op": True}}, {"mlp": {"ffn_hidden_size": 8}}, {"mlp": {"no_op": True}})
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": model_config(init_method_std=0.3)},
    "gpt_with_dropout": {"model": model_config(init_method_std=0.3, **DROPPED), "recompute_cheap": True},
    "llama": {"model": llama_config(init_method_std=0.3, num_key_value_heads=4), "recompute_cheap": True},
    "llama_with_dropout": {"model": llama_config(init_method_std=0.3, num_key_value_heads=4, **DROPPED)},
    "uneven": {"model": llama_config(num_key_value_heads=4, heterogeneous_layers_config_path=UNEVEN, **DROPPED)},
    **{
        name: {
            "model": model_config(**parts | {"init_method_std": 0.3, "num_key_value_heads": 4}),
            "recompute_cheap": index % 2 == 0,
        }
        for index, (name, parts) in enumerate(OF_FAMILIES.items())
    },
    "neox_like_with_dropout": {
        "model": model_config(**OF_FAMILIES["neox_like"] | {"init_method_std": 0.3} | DROPPED),
        "recompute_cheap": True,
    },
    "gemma_like_with_dropout": {
        "model": model_config(
            **OF_FAMILIES["gemma_like"] | {"init_method_std": 0.3, "num_key_value_heads": 4} | DROPPED
        )
    },
    "documents": {
        "model": model_config(init_method_std=0.3, **DROPPED),
        "documents": Documents(((0, 5, 13, 14), (0, 20))),
    },
}


class Layers(nn.ModuleList):
    """The layers of `gpt_layers`, each from a seed of its own, a tied one once."""

    def __init__(self, model: ModelConfig, ranks: TensorParallelRanks, *, recompute_cheap: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.tied = None
        for index, spec in enumerate(gpt_layers(model, ranks, recompute_cheap=recompute_cheap)):
            if isinstance(spec, TiedLayerSpec) and index:
                self.tied = spec.forward_fn
            else:
                torch.manual_seed(index)
                self.append(spec.build())
        self.double()

    def forward(self, tokens: Tensor, state: SequenceState, token_slice: int) -> Logits:
        hidden = tokens
        for index, layer in enumerate(self):
            past = {"past": state.past(index, token_slice)} if takes_past(layer) else {}
            hidden = layer(hidden, **past)
        return hidden if self.tied is None else self.tied(self[0], hidden)

    def train_step(self, sample: Tensor, mask: Tensor, documents: Documents | None) -> list[Tensor]:
        """Forward of every token slice, then backward, last to first; returns the losses."""
        state = SequenceState(TokenSlices(CUT), seed=3, sequences=(5, 9), documents=documents)
        tokens, labels = sample[:, :-1], sample[:, 1:]
        losses = []
        for index, (start, end) in enumerate(state.token_slices.bounds()):
            part = self(tokens[:, start:end], state, index)
            losses.append(gpt_loss(part, (labels[:, start:end], mask[:, start:end])))
        for loss in reversed(losses):
            loss.backward()
        return [loss.detach() for loss in losses]


def whole_model(name: str, ranks: TensorParallelRanks) -> None:
    """Two micro-batches, with dropout at every site, in token slices of which no two are alike."""
    settings = dict(MODELS[name])
    documents = settings.pop("documents", None)
    settings.setdefault("recompute_cheap", False)
    whole, part = Layers(ranks=ALONE, **settings), Layers(ranks=ranks, **settings)
    generator = torch.Generator().manual_seed(0)
    steps = []
    for _ in range(2):
        sample = torch.randint(0, 257, (2, sum(CUT) + 1), generator=generator)
        mask = (torch.rand(2, sum(CUT), generator=generator) < 0.8).double()
        steps.append([layers.train_step(sample, mask, documents) for layers in (part, whole)])
    gradients = complete_gradients(part, ranks)
    for found, expected in steps:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_gradients(gradients, part, whole, ranks)
