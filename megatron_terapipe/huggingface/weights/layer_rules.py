"""The rule of every weight of a pipeline layer: the names of a family, applied to the parameters that the layer has.

Which biases and norms there are follows from the layers themselves. So a family says only how a part is called.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.model.pipeline_layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.huggingface.families.tensor_names import TensorNames
from megatron_terapipe.huggingface.weights.rules import (
    Heads,
    WeightRule,
    attention,
    behind_rows,
    fused_attention,
    halves,
    same,
    stacked,
    turned,
    vocabulary,
)

Named = Callable[[str, str], WeightRule]
"""A function from the name of a parameter here, and `weight` or `bias`, to its rule."""


def layer_rules(model: ModelConfig, names: TensorNames, index: int, parameters: Iterable[str]) -> list[WeightRule]:
    """Return the rules of the parameters of a pipeline layer.

    Args:
        index: number of the layer in the pipeline.
    """
    number, last = index - LAYERS_BEFORE_BLOCKS, LAYERS_BEFORE_BLOCKS + model.num_layers
    if index < LAYERS_BEFORE_BLOCKS or index >= last:
        of_module = _ends(model, names, index, last)
    else:
        of_module = _block(model, names, f"{names.prefix}{names.blocks}.{number}.")
    rules = []
    for parameter in parameters:
        module, _, kind = parameter.rpartition(".")
        rules.append(of_module[module](parameter, kind))
    return rules


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
            return {"": lambda ours, kind: behind_rows(ours, f"{positions}.{kind}", names.unread_positions)}
        return {"": _plain(positions)}
    return {"": _plain(f"{names.prefix}{names.final_norm}")} if index == last else {"linear": words(names.output)}


def _block(model: ModelConfig, names: TensorNames, block: str) -> Mapping[str, Named]:
    """The rules of a transformer layer, by module."""

    def matrix(rule: Named) -> Named:
        return (lambda ours, kind: turned(rule(ours, kind))) if names.transposed else rule

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
        "attention.query_key_value": matrix(_attention(model, names, block)),
        "attention.projection": matrix(_plain(block + names.projection)),
        "mlp.up": matrix(_up(model, names, block)),
        "mlp.down": matrix(_plain(block + names.down)),
    }


def _attention(model: ModelConfig, names: TensorNames, block: str) -> Named:
    groups = model.num_key_value_heads
    heads = Heads(groups, model.num_attention_heads // groups, model.kv_channels)
    theirs = [block + each for each in names.query_key_value]
    if len(theirs) > 1:
        return lambda ours, kind: attention(ours, [f"{each}.{kind}" for each in theirs], heads)
    if names.grouped:
        return _plain(theirs[0])
    return lambda ours, kind: fused_attention(ours, f"{theirs[0]}.{kind}", heads)


def _up(model: ModelConfig, names: TensorNames, block: str) -> Named:
    theirs = [block + each for each in names.up]
    if len(theirs) > 1:
        return lambda ours, kind: stacked(ours, [f"{each}.{kind}" for each in theirs])
    return (lambda ours, kind: halves(ours, f"{theirs[0]}.{kind}")) if model.gated else _plain(theirs[0])


def _plain(theirs: str) -> Named:
    return lambda ours, kind: same(ours, f"{theirs}.{kind}")


def split_layer(rules: Iterable[WeightRule], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors [...] of a layer there by name; gradients, too, since every rule is linear.

    Args:
        weights: parameters of the layer by name, or their gradients.
    """
    return {
        name: tensor for rule in rules for name, tensor in zip(rule.theirs, rule.split(weights[rule.ours]), strict=True)
    }
