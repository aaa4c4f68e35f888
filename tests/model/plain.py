"""The layers once more, written out: a head at a time, a matrix of scores, complex numbers for rotations.

It shares only the weights with the layers under test.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.config.rotation import Rotation, rotation_of
from megatron_terapipe.model.attention import LatentAttention, SelfAttention
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.mlp import MLP
from megatron_terapipe.model.recurrence import RecurrentMixer

Masked = Callable[[Tensor, str], Tensor]
"""Applies dropout at a site."""


def no_dropout(values: Tensor, site: str) -> Tensor:
    return values


def rotated(heads: Tensor, rotation: Rotation, first_position: int = 0) -> Tensor:
    """[B, N, D], of which two channels are the real and the imaginary part of a number that turns."""
    pairs = len(rotation.frequencies)
    turning, rest = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
    two = turning.unflatten(-1, (pairs, 2) if rotation.interleaved else (2, pairs))
    numbers = torch.complex(*two.unbind(-1 if rotation.interleaved else -2))
    positions = torch.arange(first_position, first_position + heads.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(rotation.frequencies, dtype=torch.float64))
    numbers = numbers * torch.exp(1j * angles) * rotation.factor
    turned = torch.stack((numbers.real, numbers.imag), -1 if rotation.interleaved else -2).flatten(-2)
    return torch.cat((turned, rest), -1)


def attention_weights(
    query: Tensor, key: Tensor, model: ModelConfig, block: BlockShape, sink: Tensor | None = None
) -> Tensor:
    """Weights [B, N, N] of one head, and of its sink, if there is one, which is no key."""
    length = query.shape[1]
    scores = query @ key.transpose(1, 2) * model.softmax_scale
    if model.attention_softcap is not None:
        scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    if block.window is not None:
        unseen |= torch.ones(length, length, dtype=torch.bool).tril(-block.window)
    weights = scores.masked_fill(unseen, float("-inf")).exp()
    return weights / (weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()))


def attention(layer: SelfAttention, model: ModelConfig, block: BlockShape, hidden: Tensor, masked: Masked) -> Tensor:
    """Causal attention of one document, head by head."""
    width, in_group = model.kv_channels, model.num_attention_heads // block.num_key_value_heads
    groups, gates = block.num_key_value_heads, in_group * model.attention_output_gate
    rows = in_group + gates + 2
    rotation = rotation_of(model, block)

    def columns(group: int, place: int) -> Tensor:
        first = (group * rows + place) * width
        part = hidden @ layer.query_key_value.weight[first : first + width].T
        if layer.query_key_value.bias is not None:
            part = part + layer.query_key_value.bias[first : first + width]
        return part

    def turned(heads: list[Tensor], head_norm: nn.Module | None) -> list[Tensor]:
        if model.qk_norm == "head-rotated":
            turned = heads if rotation is None else [rotated(each, rotation) for each in heads]
            return [norm(head_norm, model, each) for each in turned]
        if model.qk_norm == "head":
            heads = [norm(head_norm, model, each) for each in heads]
        if model.qk_norm == "all-heads":
            heads = list(norm(head_norm, model, torch.cat(heads, -1)).split(width, -1))
        return heads if rotation is None else [rotated(each, rotation) for each in heads]

    queries = [columns(group, place) for group in range(groups) for place in range(in_group)]
    keys, values = ([columns(group, place) for group in range(groups)] for place in (rows - 2, rows - 1))
    queries, keys = turned(queries, layer.query_norm), turned(keys, layer.key_norm)
    outputs = []
    for head, query in enumerate(queries):
        sink = None if layer.sinks is None else layer.sinks[head]
        weights = masked(attention_weights(query, keys[head // in_group], model, block, sink), f"head {head}")
        outputs.append(weights @ values[head // in_group])
        if gates:
            outputs[-1] = outputs[-1] / (1 + torch.exp(-columns(head // in_group, in_group + head % in_group)))
    return product(layer.projection, torch.cat(outputs, -1))


def latent_attention(
    layer: LatentAttention, model: ModelConfig, block: BlockShape, hidden: Tensor, masked: Masked
) -> Tensor:
    """Causal attention of one document from latents, head by head."""
    sizes, width, rotation = block.latent, model.kv_channels, rotation_of(model, block)

    def turned(channels: Tensor) -> Tensor:
        return channels if rotation is None else rotated(channels, rotation)

    def normed(place: str, latent: Tensor) -> Tensor:
        one = getattr(layer, place)
        return latent if one is None else norm(one, model, latent)

    ends = sizes.query_rank, sizes.query_rank + sizes.rank
    from_down = hidden @ layer.down.T
    inputs = normed("query_norm", from_down[..., : ends[0]]) if sizes.query_rank else hidden
    latent, key_of_all = normed("latent_norm", from_down[..., ends[0] : ends[1]]), turned(from_down[..., ends[1] :])
    outputs = []
    for head in range(model.num_attention_heads):
        query = inputs @ layer.query_up.weight[head * width : (head + 1) * width].T
        query = torch.cat((query[..., : sizes.key_size], turned(query[..., sizes.key_size :])), -1)
        key = torch.cat((latent @ layer.up[head, : sizes.key_size].T, key_of_all), -1)
        weights = attention_weights(query, key, model, block)
        outputs.append(masked(weights, f"head {head}") @ (latent @ layer.up[head, sizes.key_size :].T))
    return product(layer.projection, torch.cat(outputs, -1))


def recurrence(layer: RecurrentMixer, hidden: Tensor) -> Tensor:
    """Mamba-2 or a gated delta net of one document, head by head and token by token."""
    sizes = layer.recurrence
    in_group, length = sizes.num_heads // sizes.num_groups, hidden.shape[1]
    keys, values = sizes.key_size, in_group * sizes.value_size
    rows = (hidden @ layer.in_projection.weight.T).unflatten(2, (sizes.num_groups, -1))
    taps = layer.convolution.weight.unflatten(0, (sizes.num_groups, -1))
    outputs = []
    for head in range(sizes.num_heads):
        group, place = divmod(head, in_group)

        def convolved(row: int, channel: int, width: int, group: int = group) -> Tensor:
            total = torch.zeros_like(rows[:, :, 0, :width])
            for back in range(min(sizes.conv_size, length)):
                tap = taps[group, channel : channel + width, sizes.conv_size - 1 - back]
                moved = F.pad(rows[:, : length - back, group, row : row + width], (0, 0, back, 0))
                total = total + moved * tap
            if layer.convolution.bias is not None:
                total = (
                    total
                    + layer.convolution.bias.unflatten(0, (sizes.num_groups, -1))[group, channel : channel + width]
                )
            return total * torch.sigmoid(total)

        own, step = slice(place * sizes.value_size, (place + 1) * sizes.value_size), layer.time_bias[head]
        speed, one = torch.exp(layer.decay[head]), torch.ones_like(rows[:, :, group, :1])
        if sizes.kind == "mamba2":
            gate = rows[:, :, group, :values][..., own]
            value = convolved(values, 0, values)[..., own]
            key, query = convolved(2 * values, values, keys), convolved(2 * values + keys, values + keys, keys)
            step = torch.log1p(torch.exp(rows[:, :, group, [2 * values + 2 * keys + place]] + step))
            rate, skip, written = one, layer.skip[head] * value, value * step
        else:
            query, key = convolved(0, 0, keys), convolved(keys, keys, keys)
            query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
            query, skip = query / sizes.key_size**0.5, 0.0
            written = convolved(2 * keys, 2 * keys, values)[..., own]
            gate = rows[:, :, group, 2 * keys + values : 2 * keys + 2 * values][..., own]
            first = 2 * keys + 2 * values
            rate = torch.sigmoid(rows[:, :, group, [first + place]])
            step = torch.log1p(torch.exp(rows[:, :, group, [first + in_group + place]] + step))
        state, found = hidden.new_zeros(len(hidden), keys, sizes.value_size), []
        for at in range(length):
            state = state * torch.exp(-speed * step[:, at])[..., None]
            known = 0.0 if sizes.kind == "mamba2" else torch.einsum("bkv,bk->bv", state, key[:, at])
            new = rate[:, at] * (written[:, at] - known)
            state = state + key[:, at, :, None] * new[:, None]
            found.append(torch.einsum("bkv,bk->bv", state, query[:, at]))
        outputs.append((torch.stack(found, 1) + skip, gate * torch.sigmoid(gate)))

    def normed(output: Tensor) -> Tensor:
        if layer.norm.bias is not None:
            output = output - output.mean(-1, keepdim=True)
        return output / (output.square().mean(-1, keepdim=True) + layer.norm.epsilon).sqrt()

    if sizes.kind == "mamba2":
        gated = [output * gate for output, gate in outputs]
        groups = [torch.cat(gated[at : at + in_group], -1) for at in range(0, sizes.num_heads, in_group)]
        mixed = torch.cat([normed(each) for each in groups], -1) * layer.norm.weight
    else:
        bias = 0.0 if layer.norm.bias is None else layer.norm.bias
        mixed = torch.cat([(normed(output) * layer.norm.weight + bias) * gate for output, gate in outputs], -1)
    return mixed @ layer.projection.weight.T


def mlp(layer: MLP, model: ModelConfig, hidden: Tensor) -> Tensor:
    if model.activation in GATES:
        gate, up = (hidden @ matrix.T for matrix in layer.up.weight)
        if layer.up.bias is not None:
            gate, up = gate + layer.up.bias[0], up + layer.up.bias[1]
        if (limit := model.activation_func_clamp_value) is not None:
            gate, up = torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)
        return product(layer.down, GATES[model.activation](gate) * (up + model.glu_linear_offset))
    wide = product(layer.up, hidden)
    return product(layer.down, ACTIVATIONS[model.activation](wide))


def gelu(wide: Tensor) -> Tensor:
    return 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))


def exact_gelu(wide: Tensor) -> Tensor:
    return 0.5 * wide * (1 + torch.erf(wide / 2**0.5))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu-exact": exact_gelu,
    "squared-relu": lambda wide: torch.where(wide > 0, wide**2, 0.0),
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda gate: gate * torch.sigmoid(gate),
    "geglu": gelu,
    "geglu-exact": exact_gelu,
    "quick-geglu": lambda gate: gate / (1 + torch.exp(-1.702 * gate)),
}


def product(layer: nn.Module, inputs: Tensor) -> Tensor:
    output = inputs @ layer.weight.T
    return output if layer.bias is None else output + layer.bias


def norm(layer: nn.Module, model: ModelConfig, hidden: Tensor) -> Tensor:
    weight = layer.weight + 1 if model.apply_layernorm_1p and layer.weight is not None else layer.weight
    if model.normalization == "rmsnorm":
        return F.rms_norm(hidden, weight.shape, weight, layer.epsilon)
    return F.layer_norm(hidden, hidden.shape[-1:], weight, layer.bias, layer.epsilon)


def block(
    layer: TransformerBlock, model: ModelConfig, shape: BlockShape, hidden: Tensor, masked: Masked = no_dropout
) -> Tensor:
    def normed(place: str, inputs: Tensor) -> Tensor:
        one = getattr(layer, place)
        return inputs if one is None else norm(one, model, inputs)

    entering = hidden
    if shape.num_key_value_heads:
        mix = attention if shape.latent is None else latent_attention
        attended = mix(layer.attention, model, shape, normed("attention_norm", entering), masked)
        attended = masked(normed("attention_post_norm", attended), "attention")
        hidden = hidden + model.residual_multiplier * attended
    if shape.ffn_hidden_size:
        place = "attention_norm" if model.shared_block_norm and shape.num_key_value_heads else "mlp_norm"
        widened = mlp(layer.mlp, model, normed(place, entering if model.parallel_residual else hidden))
        hidden = hidden + model.residual_multiplier * masked(normed("mlp_post_norm", widened), "mlp")
    return hidden


def logits(weight: Tensor, model: ModelConfig, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of the vocabulary without its padding."""
    found = hidden @ weight[: model.vocab_size].T * model.logit_multiplier
    found = found if bias is None else found + bias[: model.vocab_size]
    return found if model.logit_softcap is None else model.logit_softcap * torch.tanh(found / model.logit_softcap)


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
