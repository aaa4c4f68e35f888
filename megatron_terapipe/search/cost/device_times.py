"""Roofline's times of a layer by what they are, so that measurements can be laid beside the parts that they hold."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.layer_times import LayerQuery, LayerTimes, ScalarOrArray
from megatron_terapipe.search.op_times.roofline import Roofline

MOVING_BACKWARD = 1.4
"""Memory traffic of the backward of element-wise work in that of its forward.

Counted for scores that are written out in half precision with mask, softmax and dropout apart: the forward moves 17
bytes of each (product 2, mask 4, softmax 4, dropout 5, product 2), the backward 24 (products 2 and 2, dropout 5,
softmax 6, mask 5, products 4).
"""


class DeviceTimes(NamedTuple):
    """Seconds that the device needs, without launches and reductions."""

    products: ScalarOrArray
    """Of the matrix products of the forward."""
    moving: ScalarOrArray
    """Of everything else in the forward, which moves memory; without a loss behind it."""
    input_gradient: ScalarOrArray
    """BI of the products."""
    weight_gradient: ScalarOrArray
    """BW of the products."""
    loss_forward: ScalarOrArray = 0.0
    """Of the loss, where the layer is the head."""
    loss_gradient: ScalarOrArray = 0.0
    """Its gradient."""


class Scale(NamedTuple):
    """Device time in that of the roofline."""

    products: float = 1.0
    """Of matrix products."""
    moving: float = 1.0
    """Of everything else."""

    def within(self, products_s: float, moving_s: float, limit_s: float) -> "Scale":
        """Return this scale if it keeps the limit; else one that reaches it.

        Args:
            products_s: seconds of the products.
            moving_s: seconds of the memory traffic.
        """
        if self.products * products_s + self.moving * moving_s <= limit_s:
            return self
        return Scale.reaching(products_s, moving_s, limit_s)

    @staticmethod
    def reaching(products_s: float, moving_s: float, whole_s: float) -> "Scale":
        """Return the scale with which both take `whole_s`.

        Products are what a roofline knows best: what it misses is other work, so long as there is any.

        Args:
            products_s: seconds of the products.
            moving_s: seconds of the memory traffic.
            whole_s: seconds of both together.
        """
        if moving_s > 0 and whole_s >= products_s:
            return Scale(1.0, (whole_s - products_s) / moving_s)
        share = whole_s / (products_s + moving_s) if products_s + moving_s > 0 else 1.0
        return Scale(share, share)


def is_divided(layer: Layer) -> bool:
    """Whether tensor-parallel ranks divide a layer: any of its matrices."""
    return any(product.parallel != "none" for product in layer.products)


def device_times(
    roofline: Roofline,
    layer: Layer,
    device: Device,
    tensor_parallel_size: ScalarOrArray,
    micro_batch_size: ScalarOrArray,
    start: ScalarOrArray,
    end: ScalarOrArray,
) -> DeviceTimes:
    """Return the times of one layer; arguments broadcast.

    What the roofline knows nothing of counts 1 for each sequence. A layer none of whose matrices is divided is computed
    as a whole by every tensor-parallel rank.

    Args:
        tensor_parallel_size: ranks that share the layer.
        start: first token of the token slice.
        end: token behind its last one.
    """
    sharing = tensor_parallel_size
    if layer.products and not is_divided(layer):
        sharing = np.ones_like(np.asarray(tensor_parallel_size, dtype=float))

    def computed(what: Layer) -> LayerTimes:
        return roofline(
            LayerQuery(
                what, device, tensor_parallel_size=sharing, micro_batch_size=micro_batch_size, start=start, end=end
            )
        )

    body = replace(layer, kind="other") if layer.kind == "head" else layer
    alone = replace(body, kind="other", attention=None, num_norms=0, activation_width=0)
    whole, products = computed(body), computed(alone)
    if not np.any(whole.forward):
        # No product, norm or activation: a copy, of which only the measurement knows the time.
        one = np.asarray(micro_batch_size * (end - start) / layer.tokens)
        return DeviceTimes(np.zeros_like(one), one, 0.0, 0.0)
    moving = whole.forward - products.forward
    times = DeviceTimes(products.forward, moving, products.input_gradient, products.weight_gradient)
    if layer.kind != "head":
        return times
    with_loss = computed(layer)
    return times._replace(
        loss_forward=with_loss.forward - whole.forward,
        loss_gradient=with_loss.input_gradient
        + with_loss.weight_gradient
        - whole.input_gradient
        - whole.weight_gradient,
    )
