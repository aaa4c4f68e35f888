"""A Llama in plain torch, and the usual loop to train it: the reference of the trainer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.inference import WholeModel

Turn = tuple[Tensor, Tensor]
"""Cosine and sine of every position and half of the head: [N, D / 2] each."""


def turns(model: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Turn:
    """Cosines and sines of the rotations of the first positions, computed in fp32: each [length, D / 2]."""
    frequencies = model.rotary_base ** (-torch.arange(0, model.kv_channels, 2, device=device) / model.kv_channels)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(heads: Tensor, turn: Turn) -> Tensor:
    """Return heads [B, H, N, D] with their halves rotated.

    Args:
        heads: [B, H, N, D].
        turn: cosines and sines, each [N, D / 2].
    """
    (first, second), (cos, sin) = heads.chunk(2, dim=-1), turn
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotated halves."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_size = model.kv_channels
        self.query = nn.Linear(model.hidden_size, model.num_attention_heads * self.head_size, bias=False)
        self.key = nn.Linear(model.hidden_size, model.num_key_value_heads * self.head_size, bias=False)
        self.value = nn.Linear(model.hidden_size, model.num_key_value_heads * self.head_size, bias=False)
        self.projection = nn.Linear(model.num_attention_heads * self.head_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor, turn: Turn) -> Tensor:
        """Return the output [B, N, hidden] for an input [B, N, hidden]."""
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(
            rotated(query, turn), rotated(key, turn), value, is_causal=True, enable_gqa=True
        )
        return self.projection(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.gate = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_hidden_size, bias=False)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, hidden: Tensor, turn: Turn) -> Tensor:
        """Return the output [B, N, hidden] for an input [B, N, hidden]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), turn)
        normed = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class PlainLlama(nn.Module):
    """Token ids [B, N] in, logits [B, N, vocabulary] out."""

    def __init__(self, model: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.model, self.recompute = model, recompute
        words = model.vocab_size or 0
        self.embedding = nn.Embedding(words, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.layernorm_epsilon)
        self.output = nn.Linear(model.hidden_size, words, bias=False)
        if not model.untie_embeddings_and_output_weights:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, N, vocabulary] of the tokens [B, N]."""
        hidden = self.embedding(tokens)
        turn = turns(self.model, tokens.shape[1], hidden.device, hidden.dtype)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, turn, use_reentrant=False) if self.recompute else block(hidden, turn)
        return self.output(self.norm(hidden))

    @torch.no_grad()
    def start_as(self, whole: WholeModel, model: ModelConfig) -> "PlainLlama":
        """Take the weights of the trainer's model, without the padding of the vocabulary, for the same start."""
        theirs = {name.removeprefix("layers."): weight for name, weight in whole.named_parameters()}
        self.embedding.weight.copy_(theirs["0.weight"][: model.vocab_size])
        in_group = model.num_attention_heads // model.num_key_value_heads
        for index, block in enumerate(self.blocks, start=2):
            grouped = theirs[f"{index}.attention.query_key_value.weight"].unflatten(
                0, (-1, in_group + 2, model.kv_channels)
            )
            query, key, value = grouped.split([in_group, 1, 1], dim=1)
            block.attention.query.weight.copy_(query.flatten(0, 2))
            block.attention.key.weight.copy_(key.flatten(0, 2))
            block.attention.value.weight.copy_(value.flatten(0, 2))
            block.attention.projection.weight.copy_(theirs[f"{index}.attention.projection.weight"])
            gate, up = theirs[f"{index}.mlp.up.weight"]
            block.gate.weight.copy_(gate)
            block.up.weight.copy_(up)
            block.down.weight.copy_(theirs[f"{index}.mlp.down.weight"])
        if model.untie_embeddings_and_output_weights:
            self.output.weight.copy_(theirs[f"{model.num_layers + 3}.linear.weight"][: model.vocab_size])
        return self


def mean_loss(model: PlainLlama, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of all tokens: [].

    Args:
        tokens: [B, N].
        labels: [B, N].
    """
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def train_step(
    model: PlainLlama, optimizer: torch.optim.Optimizer, micro_batches: Iterator[tuple[Tensor, Tensor]], count: int
) -> float:
    """Do one optimizer step over `count` micro-batches, clipped at norm 1; return the mean loss.

    Args:
        micro_batches: tokens and labels, each [B, N].
    """
    optimizer.zero_grad()
    total = 0.0
    for _ in range(count):
        loss = mean_loss(model, *next(micro_batches)) / count
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total
