"""What two layers must have in common for one's times to be the other's."""

from typing import Any

from megatron_terapipe.search.reading import Fields
from megatron_terapipe.search.workload import Layer
from megatron_terapipe.search.workload.layer import Attention, Product

Shape = tuple[Any, ...]
"""Comparable."""


def shape_of(layer: Layer) -> Shape:
    """The shape of a layer, apart from the length of the sequence and what it holds beside products."""
    return (
        layer.kind,
        layer.hidden_size,
        layer.products,
        layer.attention,
        layer.num_norms,
        layer.activation_width,
        layer.gated,
    )


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """The JSON object of a shape."""
    kind, hidden_size, products, attention, num_norms, activation_width, gated = shape
    return {
        "kind": kind,
        "hidden_size": hidden_size,
        "products": [[each.inputs, each.outputs, each.parallel] for each in products],
        "attention": attention and [attention.query_heads, attention.key_value_heads, attention.head_size],
        "num_norms": num_norms,
        "activation_width": activation_width,
        "gated": gated,
    }


def shape_from_json(fields: Fields) -> Shape:
    """Read the JSON object of a shape.

    Raises:
        ConfigError: naming the field that is wrong.
    """
    kind = fields.choice("kind", ("embedding", "block", "norm", "head"))
    products = []
    for each in fields.raw("products") or []:
        if not isinstance(each, list) or len(each) != 3:
            raise fields.fault("products", "is not a list of [inputs, outputs, parallel]", "measure again")
        products.append(Product(*each))
    heads = fields.raw("attention")
    if heads is not None and (not isinstance(heads, list) or len(heads) != 3):
        raise fields.fault("attention", "is not [query heads, key and value heads, head size]", "measure again")
    shape = (
        kind,
        fields.whole("hidden_size"),
        tuple(products),
        None if heads is None else Attention(*heads),
        fields.whole("num_norms", least=0),
        fields.whole("activation_width", least=0),
        fields.flag("gated"),
    )
    fields.finish()
    return shape


def shape_in_words(shape: Shape) -> str:
    """For errors."""
    kind, hidden_size, products, attention, *_ = shape
    heads = f", {attention.query_heads} heads" if attention else ""
    vocabulary = f", {products[0].outputs} outputs" if kind == "head" else ""
    width = f", MLP of {shape[5]}" if kind == "block" else ""
    return f"a {kind} of hidden size {hidden_size}{heads}{width}{vocabulary}"
