"""A layer on one rank, with weights of its own, and its parts on several ranks; models of such layers."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.module import takes_past
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss
from megatron_terapipe.model.logits import Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import OF_FAMILIES, llama_config, model_config, uneven_layers

ALONE = TensorParallelRanks()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def part_of(whole: Tensor, parameter: nn.Parameter, ranks: TensorParallelRanks) -> Tensor:
    """The part of a tensor of the whole weight's shape that belongs to a rank's parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    step = whole.shape[parameter.partition_dim] // ranks.size
    return whole.narrow(parameter.partition_dim, ranks.rank * step, step)


def tokens_of(whole: Tensor, ranks: TensorParallelRanks) -> Tensor:
    """The tokens of [B, N, ...] that a rank has between the matrices."""
    if not ranks.sequence_parallel:
        return whole
    step = whole.shape[1] // ranks.size
    return whole.narrow(1, ranks.rank * step, step)


def fill(whole: nn.Module, part: nn.Module, ranks: TensorParallelRanks) -> None:
    """Give both the same numbers of order 1, which no initializer would."""
    for seed, (one, other) in enumerate(zip(whole.parameters(), part.parameters(), strict=True)):
        scale = one.shape[-1] ** -0.5 if one.dim() > 1 else 0.5
        one.data = drawn(*one.shape, seed=100 + seed) * scale
        other.data = part_of(one.data, other, ranks).clone()


def complete_gradients(module: nn.Module, ranks: TensorParallelRanks) -> dict[str, Tensor]:
    """Gradients by name; those of weights that each rank applied to its own tokens summed, as training does."""
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradients[name])
    return gradients


def assert_gradients(found: dict[str, Tensor], part: nn.Module, whole: nn.Module, ranks: TensorParallelRanks) -> None:
    for (name, parameter), one in zip(part.named_parameters(), whole.parameters(), strict=True):
        expected = part_of(one.grad, parameter, ranks)
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=1e-12,
            atol=1e-12 * one.grad.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )


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
