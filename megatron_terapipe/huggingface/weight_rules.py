"""The rule of every weight of a pipeline layer: which tensors of Hugging Face it is, and back.

First the rules that map one weight of ours to their tensors; then the names of a family, applied to the parameters of a
layer. Which biases and norms there are follows from the layers themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS, LatentSizes, Recurrence, prediction_layers
from megatron_terapipe.huggingface.families.family import FurtherNames, TensorNames


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A weight of a layer of ours, and the tensors that hold it there."""

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Tensor], Sequence[Tensor]]
    """From our weight to theirs."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """From theirs to ours, without change of a bit."""


def same(ours: str, theirs: str) -> WeightRule:
    """Return the rule of a tensor that is equal on both sides."""
    return WeightRule(ours, (theirs,), lambda weight: (weight,), lambda tensors: tensors[0])


def row(ours: str, theirs: str) -> WeightRule:
    """Return the rule of a tensor [N] here that is [1, N] there."""
    return WeightRule(ours, (theirs,), lambda weight: (weight.unsqueeze(0),), lambda tensors: tensors[0].squeeze(0))


def vocabulary(ours: str, theirs: str, *, words: int, rows: int) -> WeightRule:
    """A row for each word; ours has more, so that ranks can share them."""

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        # With the mean of all rows padding is as likely as an average word; with zeros it might be the likeliest.
        mean = weight.float().mean(0, keepdim=True).to(weight.dtype)
        return torch.cat([weight, mean.expand(rows - words, *weight.shape[1:])])

    return WeightRule(ours, (theirs,), lambda weight: (weight[:words],), padded)


def stacked(ours: str, theirs: Sequence[str], parts: int = 1) -> WeightRule:
    """Return the rule of a tensor [N, ...] here that is N tensors there, or of [N, parts, ...] that is N x parts."""
    sizes = (-1, parts) if parts > 1 else (-1,)
    return WeightRule(
        ours,
        tuple(theirs),
        lambda weight: weight.flatten(0, len(sizes) - 1).unbind(),
        lambda tensors: torch.stack(tuple(tensors)).unflatten(0, sizes),
    )


def halves(ours: str, theirs: str, dimension: int = 0) -> WeightRule:
    """Return the rule of a tensor [..., 2, n, ...] here that is [..., 2 n, ...] there."""
    return WeightRule(
        ours,
        (theirs,),
        lambda weight: (weight.flatten(dimension, dimension + 1),),
        lambda tensors: tensors[0].unflatten(dimension, (2, -1)),
    )


def alternating(ours: str, theirs: str, parts: int) -> WeightRule:
    """Return the rule of a tensor [E, parts, out, in] here that is [E, in, out x parts] there, the parts in turn."""

    def split(weight: Tensor) -> tuple[Tensor]:
        return (weight.transpose(1, -1).flatten(-2) if parts > 1 else weight.transpose(1, -1),)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return (tensors[0].unflatten(-1, (-1, parts)) if parts > 1 else tensors[0]).transpose(1, -1).contiguous()

    return WeightRule(ours, (theirs,), split, join)


def after_unread_rows(ours: str, theirs: str, rows: int) -> WeightRule:
    """Return the rule of a tensor that has unread rows before the first one there."""

    def longer(weight: Tensor) -> tuple[Tensor]:
        return (torch.cat([weight.new_zeros(rows, *weight.shape[1:]), weight]),)

    return WeightRule(ours, (theirs,), longer, lambda tensors: tensors[0][rows:])


def by_group(ours: str, theirs: Mapping[str, tuple[int, ...]], groups: int, *, taps: bool = False) -> WeightRule:
    """Return the rule of rows that are group after group here, and part after part there.

    Args:
        theirs: rows of each part in a group, by tensor.
        taps: whether theirs is the weight [C, 1, W] of a convolution, [C, W] here.
    """
    rows, sizes = sum(theirs.values(), ()), [groups * sum(parts) for parts in theirs.values()]

    def split(weight: Tensor) -> Sequence[Tensor]:
        parts = weight.unflatten(0, (groups, -1)).split(rows, dim=1)
        joined = torch.cat([each.flatten(0, 1) for each in parts])
        return tuple((joined.unsqueeze(1) if taps else joined).split(sizes))

    def join(tensors: Sequence[Tensor]) -> Tensor:
        weight = torch.cat(tuple(tensors))
        parts = (weight.squeeze(1) if taps else weight).split([groups * each for each in rows])
        return torch.cat([each.unflatten(0, (groups, -1)) for each in parts], dim=1).flatten(0, 1)

    return WeightRule(ours, tuple(theirs), split, join)


@dataclass(frozen=True, slots=True)
class Heads:
    """Order of queries, keys and values in our product: for each group its query heads, its key and its value head.

    Gates follow the query heads of their group here; there each follows its query head, or they are a tensor apart.
    """

    groups: int
    heads_of_group: int
    size: int
    gated: bool = False
    gates_apart: bool = False

    @property
    def queries_of_group(self) -> int:
        """Query heads of a group, and their gates."""
        return self.heads_of_group * (1 + self.gated)

    def apart(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of our product, each head after head: tensors [heads x size, ...].

        Args:
            weight: [(query heads + 2 x key heads) x size, ...], group after group.
        """
        grouped = weight.unflatten(0, (self.groups, self.queries_of_group + 2, self.size))
        query, key, value = grouped.split([self.queries_of_group, 1, 1], dim=1)
        gates: tuple[Tensor, ...] = ()
        if self.gates_apart:
            query, *gates = query.chunk(2, dim=1)
        elif self.gated:
            query = query.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return tuple(each.flatten(0, 2) for each in (query, key, value, *gates))

    def grouped(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the weight [outputs, hidden] of our product, from queries, keys and values: undoes `apart`."""
        parts = [each.unflatten(0, (self.groups, -1, self.size)) for each in tensors]
        if self.gates_apart:
            parts.insert(1, parts.pop())
        elif self.gated:
            parts[0] = parts[0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat(parts, dim=1).flatten(0, 2)


def turned(rule: WeightRule) -> WeightRule:
    """Return the rule of a weight whose matrices [out, in] here are [in, out] there; a bias is unchanged."""
    return WeightRule(
        rule.ours,
        rule.theirs,
        lambda weight: [_turned(each) for each in rule.split(weight)],
        lambda tensors: rule.join([_turned(each) for each in tensors]),
    )


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous() if weight.dim() == 2 else weight


Named = Callable[[str, str], WeightRule]
"""A function from the name of a parameter here, and `weight` or `bias`, to its rule."""


def layer_rules(model: ModelConfig, names: TensorNames, index: int, parameters: Iterable[str]) -> list[WeightRule]:
    """Return the rules of the parameters of a pipeline layer."""
    last, shape = LAYERS_BEFORE_BLOCKS + model.num_layers, model.blocks_by_index.get(index)
    further: Mapping[str, Named] = {}
    if shape is None:
        of_module = _ends(model, names, index, last)
    else:
        block = f"{names.prefix}{names.blocks}.{(index - LAYERS_BEFORE_BLOCKS) // names.parts}."
        if index >= last:
            assert names.further is not None, "without names for them a model has no such layers"
            number = names.further.first + index - prediction_layers(model.num_layers, 1).start
            further, block = _further(names.further, number), names.further.block.format(number)
        of_module = {**_block(model, names, block), **further}
        if shape.recurrence is not None:
            of_module = {**of_module, **_recurrence(shape.recurrence, names, block)}
        elif shape.latent is not None:
            of_module = {**of_module, **_latent_attention(shape.latent, names, block)}
    rules = []
    for parameter in parameters:
        in_block = parameter.removeprefix("block.")
        module, _, kind = in_block.rpartition(".")
        rules.append(replace(of_module[module](in_block, kind), ours=parameter))
    return rules


def _further(names: FurtherNames, number: int) -> Mapping[str, Named]:
    """The rules of a layer that predicts a further token, without its transformer layer, by module."""
    begin = names.begin.format(number)
    return {
        "": lambda ours, kind: same(ours, f"{begin}{names.projection}.weight"),
        "words_norm": _plain(begin + names.words_norm),
        "hidden_norm": _plain(begin + names.hidden_norm),
        "final_norm": _plain(begin + names.final_norm),
    }


def _ends(model: ModelConfig, names: TensorNames, index: int, last: int) -> Mapping[str, Named]:
    """The rules of the layers before and after the transformer layers, by module."""

    def words(name: str) -> Named:
        rows = model.padded_vocab_size()
        return lambda ours, kind: vocabulary(ours, f"{name}.{kind}", words=model.vocab_size or 0, rows=rows)

    if index == 0:
        return {"": words(f"{names.prefix}{names.words}")}
    if index == 1:
        positions = f"{names.prefix}{names.positions}"
        if names.unread_positions:
            return {"": lambda ours, kind: after_unread_rows(ours, f"{positions}.{kind}", names.unread_positions)}
        return {"": _plain(positions)}
    return {"": _plain(f"{names.prefix}{names.final_norm}")} if index == last else {"linear": words(names.output)}


def _block(model: ModelConfig, names: TensorNames, block: str) -> Mapping[str, Named]:
    """The rules of a transformer layer, by module."""

    def matrix(rule: Named) -> Named:
        return (lambda ours, kind: turned(rule(ours, kind))) if names.transposed else rule

    def of_router(ours: str, kind: str) -> WeightRule:
        if kind != "expert_bias":
            return same(ours, f"{block}{names.router}.{kind}")
        bias = block + names.router_bias
        return row(ours, bias) if names.router_bias_of_row else same(ours, bias)

    norms = {
        "attention_norm": names.attention_norm,
        "attention_post_norm": names.attention_output_norm,
        "mlp_norm": names.mlp_norm,
        "mlp_post_norm": names.mlp_output_norm,
        "attention.query_norm": names.query_norm,
        "attention.key_norm": names.key_norm,
    }
    return {
        **{module: _plain(block + theirs) for module, theirs in norms.items()},
        "attention": lambda ours, kind: same(ours, block + names.sinks),
        "attention.query_key_value": matrix(_attention(model, names, block)),
        "attention.projection": matrix(_plain(block + names.projection)),
        "mlp.up": matrix(_up(model, names.up, block)),
        "mlp.down": matrix(_plain(block + names.down)),
        "mlp": lambda ours, kind: same(ours, block + names.shared_gate),
        "mlp.router": of_router,
        "mlp.experts": _experts(model, names, block),
        "mlp.shared.up": _up(model, names.shared_up, block),
        "mlp.shared.down": _plain(block + names.shared_down),
    }


def _experts(model: ModelConfig, names: TensorNames, block: str) -> Named:
    def rule(ours: str, kind: str) -> WeightRule:
        matrix, _, bias = kind.partition("_")
        tensors = names.expert_up if matrix == "up" else (names.expert_down,)
        if names.alternating_experts:
            return alternating(ours, f"{block}{tensors[0]}{bias and '_bias'}", 1 + (model.gated and matrix == "up"))
        theirs = [f"{block}{name}.{bias or 'weight'}" for name in tensors]
        if "{}" in theirs[0]:
            numbered = [name.format(expert) for expert in range(model.num_experts or 0) for name in theirs]
            return stacked(ours, numbered, len(theirs))
        return halves(ours, theirs[0], 1) if matrix == "up" and model.gated else same(ours, theirs[0])

    return rule


def _attention(model: ModelConfig, names: TensorNames, block: str) -> Named:
    """The rule of our product of queries, keys and values: a tensor each there, or one with all queries first."""
    groups = model.num_key_value_heads
    theirs = [block + each for each in names.query_key_value]
    heads = Heads(
        *(groups, model.num_attention_heads // groups, model.kv_channels),
        gated=model.attention_output_gate,
        gates_apart=len(theirs) > 3,
    )
    if len(theirs) == 1 and names.grouped:
        return _plain(theirs[0])
    rows = [groups * count * heads.size for count in (heads.queries_of_group, 1, 1)]

    def rule(ours: str, kind: str) -> WeightRule:
        tensors = tuple(f"{each}.{kind}" for each in theirs)
        if len(tensors) > 1:
            return WeightRule(ours, tensors, heads.apart, heads.grouped)
        return WeightRule(
            ours,
            tensors,
            lambda weight: (torch.cat(heads.apart(weight)),),
            lambda found: heads.grouped(found[0].split(rows)),
        )

    return rule


def _latent_attention(sizes: LatentSizes, names: TensorNames, block: str) -> Mapping[str, Named]:
    """The rules of latent attention: the matrix to all latents is two there, or one without a query latent."""
    down = {
        f"{block}{names.query_down}.weight": sizes.query_rank,
        f"{block}{names.latent_down}.weight": sizes.kept_size,
    }
    parts = {name: rows for name, rows in down.items() if rows}
    to_latents = WeightRule(
        "attention.down",
        tuple(parts),
        lambda weight: weight.split(list(parts.values())),
        lambda found: torch.cat(found),
    )
    of_heads = WeightRule(
        "attention.up",
        (f"{block}{names.latent_up}.weight",),
        lambda weight: (weight.flatten(0, 1),),
        lambda found: found[0].unflatten(0, (-1, sizes.key_size + sizes.value_size)),
    )
    return {
        "attention": lambda ours, kind: to_latents if kind == "down" else of_heads,
        "attention.query_norm": _plain(block + names.query_latent_norm),
        "attention.latent_norm": _plain(block + names.latent_norm),
        "attention.query_up": _plain(block + (names.query_up if sizes.query_rank else names.latent_query)),
    }


def _recurrence(sizes: Recurrence, names: TensorNames, block: str) -> Mapping[str, Named]:
    """The rules of a layer with a state, whose rows are grouped here, and there part after part or also grouped."""
    groups, heads, keys = sizes.num_groups, sizes.num_heads // sizes.num_groups, sizes.key_size
    values = heads * sizes.value_size
    mixer, channels = f"{block}linear_attn.", (keys, keys, values)
    parts: dict[str, tuple[int, ...]] = {"_qkv": channels, "_z": (values,), "_b": (heads,), "_a": (heads,)}
    if sizes.kind == "mamba2":
        mixer, channels = f"{block}{names.mixer}.", (values, keys, keys)
        parts = {"": (values, *channels, heads)}
    elif names.grouped:
        parts = {"_qkvz": (sum(channels) + values,), "_ba": (2 * heads,)}
    rows = {f"{mixer}in_proj{name}.weight": each for name, each in parts.items()}

    def convolution(ours: str, kind: str) -> WeightRule:
        return by_group(ours, {f"{mixer}conv1d.{kind}": channels}, groups, taps=kind == "weight")

    of_heads = {"attention.decay": "A_log", "attention.time_bias": "dt_bias", "attention.skip": "D"}
    return {
        "attention": lambda ours, kind: same(ours, mixer + of_heads[ours]),
        "attention.in_projection": lambda ours, kind: by_group(ours, rows, groups),
        "attention.convolution": convolution,
        "attention.norm": _plain(f"{mixer}norm"),
        "attention.projection": _plain(f"{mixer}out_proj"),
    }


def _up(model: ModelConfig, up: Sequence[str], block: str) -> Named:
    theirs = [block + each for each in up]
    if len(theirs) > 1:
        return lambda ours, kind: stacked(ours, [f"{each}.{kind}" for each in theirs])
    return (lambda ours, kind: halves(ours, f"{theirs[0]}.{kind}")) if model.gated else _plain(theirs[0])


def _plain(theirs: str) -> Named:
    return lambda ours, kind: same(ours, f"{theirs}.{kind}")


def split_layer(rules: Iterable[WeightRule], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors [...] of a layer there by name; gradients, too, since every rule is linear."""
    return {
        name: tensor for rule in rules for name, tensor in zip(rule.theirs, rule.split(weights[rule.ours]), strict=True)
    }
