"""The layers once more, written out: a head at a time, a matrix of scores, complex numbers for rotations.

It reads the weights of the layers under test and shares nothing else with them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.sequence.documents import Documents
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.block_shape import BlockShape
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.mlp import MLP

Masked = Callable[[Tensor, str], Tensor]
"""Applies dropout, told at which site."""


def no_dropout(values: Tensor, site: str) -> Tensor:
    return values


def rotated(heads: Tensor, channels: int, base: float, first_position: int = 0) -> Tensor:
    """[B, N, D], whose channel c is the real part of a number that c + channels / 2 is the imaginary part of."""
    half = channels // 2
    positions = torch.arange(first_position, first_position + heads.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, base ** -(torch.arange(half, dtype=torch.float64) / half))
    numbers = torch.complex(heads[..., :half], heads[..., half:channels]) * torch.exp(1j * angles)
    return torch.cat((numbers.real, numbers.imag, heads[..., channels:]), -1)


def attention(layer: SelfAttention, model: ModelConfig, block: BlockShape, hidden: Tensor, masked: Masked) -> Tensor:
    """Causal attention of one document, head by head."""
    width, in_group = model.kv_channels, model.num_attention_heads // block.num_key_value_heads
    rope = model.position_embedding_type == "rope"

    def columns(group: int, place: int, *, turns: bool) -> Tensor:
        first = (group * (in_group + 2) + place) * width
        part = hidden @ layer.query_key_value.weight[first : first + width].T
        if layer.query_key_value.bias is not None:
            part = part + layer.query_key_value.bias[first : first + width]
        return rotated(part, int(width * model.rotary_percent), model.rotary_base) if turns and rope else part

    length = hidden.shape[1]
    outputs = []
    for head in range(model.num_attention_heads):
        group, place = divmod(head, in_group)
        query, key = columns(group, place, turns=True), columns(group, in_group, turns=True)
        scores = query @ key.transpose(1, 2) / width**0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        weights = masked(scores.softmax(-1), f"head {head}")
        outputs.append(weights @ columns(group, in_group + 1, turns=False))
    return product(layer.projection, torch.cat(outputs, -1))


def attention_by_document(
    layer: SelfAttention, model: ModelConfig, block: BlockShape, hidden: Tensor, starts: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Attention in which every document of every row is a sequence of its own."""
    rows = []
    for row, begins in enumerate(starts):
        ends = (*begins[1:], hidden.shape[1])
        pieces = [hidden[row : row + 1, begin:end] for begin, end in zip(begins, ends, strict=True)]
        rows.append(torch.cat([attention(layer, model, block, piece, no_dropout) for piece in pieces], dim=1))
    return torch.cat(rows)


def mlp(layer: MLP, model: ModelConfig, hidden: Tensor) -> Tensor:
    if model.activation == "swiglu":
        gate, up = (hidden @ matrix.T for matrix in layer.up.weight)
        if layer.up.bias is not None:
            gate, up = gate + layer.up.bias[0], up + layer.up.bias[1]
        return product(layer.down, gate * torch.sigmoid(gate) * up)
    wide = product(layer.up, hidden)
    if model.activation == "gelu":
        wide = 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    else:
        assert model.activation == "squared-relu"
        wide = torch.where(wide > 0, wide**2, 0.0)
    return product(layer.down, wide)


def product(layer: nn.Module, inputs: Tensor) -> Tensor:
    output = inputs @ layer.weight.T
    return output if layer.bias is None else output + layer.bias


def norm(layer: nn.Module, model: ModelConfig, hidden: Tensor) -> Tensor:
    if model.normalization == "rmsnorm":
        return F.rms_norm(hidden, layer.weight.shape, layer.weight, model.layernorm_epsilon)
    return F.layer_norm(hidden, layer.weight.shape, layer.weight, layer.bias, model.layernorm_epsilon)


def block(
    layer: TransformerBlock, model: ModelConfig, shape: BlockShape, hidden: Tensor, masked: Masked = no_dropout
) -> Tensor:
    if shape.num_key_value_heads:
        normed = norm(layer.attention_norm, model, hidden)
        hidden = hidden + masked(attention(layer.attention, model, shape, normed, masked), "attention")
    if shape.ffn_hidden_size:
        hidden = hidden + masked(mlp(layer.mlp, model, norm(layer.mlp_norm, model, hidden)), "mlp")
    return hidden


def in_token_slices(
    layer: nn.Module, hidden: Tensor, cut: tuple[int, ...], *, number: int = 0, documents: Documents | None = None
) -> Tensor:
    """A layer's output, computed token slice by token slice; two rows of `hidden`, numbers 5 and 9."""
    token_slices = TokenSlices(cut)
    state = SequenceState(token_slices, seed=7, sequences=(5, 9), documents=documents)
    parts = [
        layer(hidden[:, start:end], past=state.past(number, index))
        for index, (start, end) in enumerate(token_slices.bounds())
    ]
    return torch.cat(parts, dim=1)


def random_weights(layer: nn.Module, seed: int = 0) -> nn.Module:
    """The layer in fp64, all its weights of order 1, so that no part of it is as good as absent."""
    generator = torch.Generator().manual_seed(seed)
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return layer


def hidden_state(width: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
