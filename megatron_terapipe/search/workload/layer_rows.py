"""The `layers` of a model file: any model, layer by layer, by shapes or by measured costs."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast, get_args

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.reading import Fields, short
from megatron_terapipe.search.workload.layer import Attention, Layer, LayerKind, Parallel, Product

MOST_LAYERS = 10_000
"""Of a model: more would be a slip of the hand."""


def read_layers(model: Fields) -> tuple[Layer, ...]:
    """Read the layers of a model, first to last.

    Each entry has `tokens` and `hidden_size`, and what else the layer has: `kind`, `name`, `repeat` (equal layers one
    after the other), `products`, `attention`, `parameters`, `unshared_parameters`, `num_norms`, `activation_width`,
    `gated`, `shared_weight`, `shared_parameters`, `extra_output_elements`, `forward_s`.

    Args:
        model: the object with the list `layers`.

    Raises:
        ConfigError: if a field is wrong.
    """
    layers: list[Layer] = []
    for entry in model.sections("layers"):
        repeat = entry.whole("repeat", 1, most=MOST_LAYERS)
        layer = _read_layer(entry)
        entry.finish()
        layers += [layer] * repeat
    shared: dict[str, int] = {}
    for layer in layers:
        if layer.shared_weight is not None:
            entries = shared.setdefault(layer.shared_weight, layer.shared_parameters)
            if entries != layer.shared_parameters:
                raise ConfigError(
                    f"{model.place('layers')}: shared weight {layer.shared_weight!r} has {entries} entries in one "
                    f"layer and {layer.shared_parameters} in another: make shared_parameters agree"
                )
    return tuple(layers)


def _read_layer(entry: Fields) -> Layer:
    kind = entry.choice("kind", get_args(LayerKind), "block")
    products = tuple(_read_product(each) for each in entry.sections("products")) if entry.has("products") else ()
    attention = _read_attention(entry.section("attention")) if entry.has("attention") else None
    weights = sum(product.weights for product in products)
    parameters = entry.whole("parameters", weights, least=0)
    layer = Layer(
        name=entry.text("name", kind),
        kind=cast(LayerKind, kind),
        tokens=entry.whole("tokens"),
        hidden_size=entry.whole("hidden_size"),
        parameters=parameters,
        unshared_parameters=entry.whole("unshared_parameters", 0, least=0),
        products=products,
        attention=attention,
        num_norms=entry.whole("num_norms", 0, least=0),
        activation_width=entry.whole("activation_width", 0, least=0),
        gated=entry.flag("gated", False),
        shared_weight=entry.text("shared_weight") if entry.has("shared_weight") else None,
        shared_parameters=entry.whole("shared_parameters", 0, least=0),
        extra_output_elements=entry.whole("extra_output_elements", 0, least=0),
        forward_s=_read_forward(entry) if entry.has("forward_s") else None,
    )
    for name in ("unshared_parameters", "shared_parameters"):
        if getattr(layer, name) > parameters:
            raise entry.fault(name, f"is more than the layer's {parameters} parameters", "correct one of them")
    if attention is not None and attention.window is not None and layer.tokens % attention.window:
        raise ConfigError(
            f"{entry.place('attention.window')} {attention.window} does not divide the layer's {layer.tokens} tokens: "
            "change one of them"
        )
    return layer


def _read_product(entry: Fields) -> Product:
    product = Product(
        entry.whole("inputs"),
        entry.whole("outputs"),
        cast(Parallel, entry.choice("parallel", get_args(Parallel), "none")),
    )
    entry.finish()
    return product


def _read_attention(entry: Fields) -> Attention:
    query_heads = entry.whole("query_heads")
    attention = Attention(
        query_heads,
        entry.whole("key_value_heads", query_heads),
        entry.whole("head_size"),
        causal=entry.flag("causal", True),
        window=entry.whole("window") if entry.has("window") else None,
    )
    if query_heads % attention.key_value_heads:
        raise entry.fault("key_value_heads", f"does not divide query_heads {query_heads}", "give one of its divisors")
    entry.finish()
    return attention


def _read_forward(entry: Fields) -> Mapping[int, float]:
    """Seconds of one sequence by tensor-parallel size; a single number is that without tensor parallelism."""
    value = entry.raw("forward_s")
    by_size = value if isinstance(value, Mapping) else {1: value}
    costs: dict[int, float] = {}
    for size, seconds in by_size.items():
        whole = int(size) if str(size).isdecimal() else 0
        good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and math.isfinite(seconds)
        if whole < 1 or not good or seconds < 0:
            raise ConfigError(
                f"{entry.place('forward_s')} {short(value)} is not seconds by tensor-parallel size: "
                'write it as {"1": 0.004, "2": 0.003}'
            )
        costs[whole] = float(seconds)
    if not costs:
        raise entry.fault("forward_s", "says nothing", 'write it as {"1": 0.004}, or drop it')
    return MappingProxyType(costs)
