"""The benchmark's GPT in plain torch: what DeepSpeed's and torch's pipelines run, and all engines are held against.

Layers are numbered, and their weights named, as those of `gpt_layers`: so weights and gradients are compared by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_terapipe.config import ModelConfig


class Positions(nn.Embedding):
    """Adds a learned vector for each position."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        return hidden + self.weight[: hidden.shape[1]]


class Attention(nn.Module):
    """Causal attention of all heads, with query, key and value of a head side by side, as Megatron has them."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.num_heads = model.num_attention_heads
        self.query_key_value = nn.Linear(model.hidden_size, 3 * model.hidden_size)
        self.projection = nn.Linear(model.hidden_size, model.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        heads = self.query_key_value(hidden).unflatten(-1, (self.num_heads, 3, -1))
        query, key, value = (each.transpose(1, 2) for each in heads.unbind(-2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden_size, model.ffn_hidden_size)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.mlp = MLP(model)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, the same out."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class OutputLayer(nn.Module):
    """Logits from a weight of their own: pipelines of torch share no weights between ranks."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(model.hidden_size, model.padded_vocab_size(1), bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, N, hidden] in, logits [B, N, vocabulary] out."""
        return self.linear(hidden)


def plain_layers(model: ModelConfig) -> list[nn.Module]:
    """Return the layers of the model, first to last, with weights that are the same each time."""
    words, hidden = model.padded_vocab_size(1), model.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        layers = [
            nn.Embedding(words, hidden),
            Positions(model.max_position_embeddings, hidden),
            *(Block(model) for _ in range(model.num_layers)),
            nn.LayerNorm(hidden, eps=model.layernorm_epsilon),
            OutputLayer(model),
        ]
        with torch.no_grad():
            for layer in layers:
                for weight in layer.parameters():
                    # Norms and biases too: what is 1 or 0 everywhere hides a mistake.
                    weight.add_(torch.randn_like(weight), alpha=0.02) if weight.dim() == 1 else weight.normal_(0, 0.02)
    return layers


def stage_bounds(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage, and the end: equal numbers of blocks; embeddings first, logits last."""
    inner = (2 + stage * num_blocks // num_stages for stage in range(1, num_stages))
    return (0, *inner, num_blocks + 4)


class Stage(nn.Module):
    """Some of the layers, one after the other, under their numbers in the whole model."""

    def __init__(self, layers: Sequence[nn.Module], first: int, end: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layers[number] for number in range(first, end)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Output of the last layer [B, N, ...] for the input [B, N, ...] of the first."""
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The weights by the number of their layer and their name in it."""
        return {name.removeprefix("layers."): weight for name, weight in self.named_parameters()}


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of all tokens: [].

    Args:
        logits: [B, N, vocabulary].
        labels: [B, N].
    """
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
