"""Op times from forwards that were measured at one micro-batch size, as time of the host and of the device.

A small forward takes as long as its host needs to launch it, however fast the device is, and does not take longer
with twice the sequences. A scaling in proportion to the micro-batch would be wrong. One measurement does not separate
the two; three observations together do:

  * layers of the same structure are launched by the same calls, so that the fastest of them, on whatever device, is an
    upper limit of the launch time of all;
  * where a layer takes clearly longer than that limit, its device is the reason;
  * the error of a roofline there (unfused element-wise work, slow kernels) is the same on every device.

So the roofline gives the shape of the device's time over micro-batch size, tensor-parallel size and backward; the
measurement gives its scale where the device was the limit, and the launches where the host was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megatron_terapipe.devices import Device
from megatron_terapipe.errors import DataError
from megatron_terapipe.search.machine.cluster import Link
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes, Numbers, ScalarOrArray
from megatron_terapipe.search.price.links import GroupTopology, all_reduce_s
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.stages import reductions
from megatron_terapipe.search.price.workload import Layer, Workload

MOVING_BACKWARD = 1.4
"""Memory traffic of the backward of element-wise work, relative to its forward.

Counted for scores that are written out in half precision with mask, softmax and dropout apart: the forward moves 17
bytes of each (product 2, mask 4, softmax 4, dropout 5, product 2), the backward 24 (products 2 and 2, dropout 5,
softmax 6, mask 5, products 4).
"""


class DeviceTimes(NamedTuple):
    """Seconds that the device needs, without launches and reductions."""

    products: ScalarOrArray
    """Of the matrix products of the forward."""
    moving: ScalarOrArray
    """Of all other work in the forward, which moves memory; without the loss."""
    input_gradient: ScalarOrArray
    weight_gradient: ScalarOrArray
    loss_forward: ScalarOrArray = 0.0
    """Of the loss, where the layer is the head."""
    loss_gradient: ScalarOrArray = 0.0


class Scale(NamedTuple):
    """Device time, relative to the roofline."""

    products: float = 1.0
    moving: float = 1.0

    def within(self, products_s: float, moving_s: float, limit_s: float) -> "Scale":
        """Return this scale if it keeps the limit; else one that reaches it."""
        if self.products * products_s + self.moving * moving_s <= limit_s:
            return self
        return Scale.reaching(products_s, moving_s, limit_s)

    @staticmethod
    def reaching(products_s: float, moving_s: float, whole_s: float) -> "Scale":
        """Return the scale with which both take `whole_s`.

        A roofline is most accurate for products: its error is in other work, if there is any.

        Args:
            products_s: seconds of the products.
            moving_s: seconds of the memory traffic.
            whole_s: seconds of both together.
        """
        if moving_s > 0 and whole_s >= products_s:
            return Scale(1.0, (whole_s - products_s) / moving_s)
        share = whole_s / (products_s + moving_s) if products_s + moving_s > 0 else 1.0
        return Scale(share, share)


def device_times(roofline: Roofline, query: LayerQuery) -> DeviceTimes:
    """Return the times [...] of one layer, in the shape that the sizes of the query broadcast to.

    A layer without products, norms and activations counts 1 for each sequence. A layer without divided matrices is
    computed as a whole by every tensor-parallel rank.
    """
    layer = query.layer
    if layer.products and not layer.is_divided:
        query = replace(query, tensor_parallel_size=np.ones_like(np.asarray(query.tensor_parallel_size, dtype=float)))

    def computed(part: Layer) -> LayerTimes:
        return roofline(replace(query, layer=part))

    body = replace(layer, kind="other") if layer.kind == "head" else layer
    without_moves = replace(body, kind="other", attention=None, num_norms=0, activation_width=0)
    whole, products = computed(body), computed(without_moves)
    if not np.any(whole.forward):
        # No product, norm or activation: a copy, with a time that only the measurement has.
        one = np.asarray(query.rows / layer.tokens)
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


CLEARLY = 1.2
"""How many times the launch limit a measurement must be for its device to be the reason: where both are alike, their
difference is noise."""

BACKWARD_LAUNCHES = 1.0
"""Host time of a backward, relative to its forward: autograd launches about twice the kernels, from C++ and not from
Python. An assumption, not a fit."""

HIDING = 4
"""Power of the norm that joins launching and computing: the longer hides the shorter, less so where both are alike."""

Structure = tuple[object, ...]
Limits = Mapping[Structure, Mapping[int, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDevice:
    """A device on which all layers were measured."""

    device: Device
    roofline: Roofline
    inside: Link
    """Link between the tensor-parallel ranks of the measurement, which were on one node."""
    forward_s: Mapping[str, Mapping[int, float]]
    """Seconds by layer name and tensor-parallel size, of the forward of one sequence, reductions included."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers:
    """Times of the layers of one model on devices that it was measured on; an `OpTimes`.

    Reductions are in the times, as they were in the measurement: over the links inside a node.
    """

    workload: Workload
    """The model; its layers have different names."""
    devices: Mapping[str, MeasuredDevice]
    element_bytes: int = 2
    _scales: dict[tuple[str, str], Mapping[int, Scale]] = field(init=False, default_factory=dict, repr=False)
    _launch_s: dict[tuple[str, str], Mapping[int, float]] = field(init=False, default_factory=dict, repr=False)
    _computed: dict[tuple[object, ...], DeviceTimes] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, measured in self.devices.items():
            for layer in self.workload.layers:
                if not measured.forward_s.get(layer.name):
                    raise DataError(
                        f"profile of {name}: layer {layer.name!r} has no time: measure it, or name another profile"
                    )
        limits = self._launch_limits()
        for layer in self.workload.layers:
            sizes = {size for measured in self.devices.values() for size in measured.forward_s[layer.name]}
            scale = {size: self._scale(layer, limits, size) for size in sizes}
            for name, measured in self.devices.items():
                key = name, layer.name
                self._scales[key], self._launch_s[key] = self._take_apart(measured, layer, scale)

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`. Sequence parallelism moves the same bytes, and costs the same."""
        layer, device = query.layer, query.device
        measured = self.devices.get(device.name)
        if measured is None:
            raise DataError(f"no profile of {device.name}: the profiles are of {', '.join(self.devices)}")
        scales, launch_s = self._scales[device.name, layer.name], self._launch_s[device.name, layer.name]
        sizes = np.asarray(query.tensor_parallel_size, dtype=float)
        missing = sorted(set(np.unique(sizes).tolist()) - set(scales))
        if missing:
            raise DataError(
                f"profile of {device.name}: layer {layer.name!r} was not measured with tensor-parallel size "
                f"{missing[0]:g}: choose among {', '.join(map(str, scales))}"
            )
        of_roofline = LayerQuery(
            layer,
            device,
            tensor_parallel_size=sizes,
            micro_batch_size=query.sequences,
            start=query.start,
            end=query.end,
        )
        times = self._device_times(measured, of_roofline)
        of_products = _at({size: scale.products for size, scale in scales.items()}, sizes)
        of_moving = _at({size: scale.moving for size, scale in scales.items()}, sizes)
        launch = _at(launch_s, sizes)
        reduced = self._one_reduction_s(measured, layer, sizes, query.rows)
        entering, leaving = reductions(layer)
        # The loss is not a pipeline layer and was not measured: its time is from the roofline.
        computed = of_products * times.products + of_moving * times.moving
        forward = hidden(computed + times.loss_forward + leaving * reduced, launch)
        inputs = of_products * times.input_gradient + MOVING_BACKWARD * of_moving * times.moving
        others = inputs + times.loss_gradient + entering * reduced
        weights = of_products * times.weight_gradient
        whole = hidden(others + weights, BACKWARD_LAUNCHES * launch)
        of_weights = weights / np.maximum(others + weights, 1e-12)
        again = forward if query.recompute == "full" else 0.0
        return LayerTimes(forward, whole * (1 - of_weights) + again, whole * of_weights)

    def _launch_limits(self) -> Limits:
        """By structure the seconds that launching takes at most, by tensor-parallel size."""
        fastest: dict[Structure, dict[int, float]] = {}
        for measured in self.devices.values():
            for layer in self.workload.layers:
                of_structure = fastest.setdefault(_structure(layer), {})
                for size, seconds in measured.forward_s[layer.name].items():
                    of_structure[size] = min(seconds, of_structure.get(size, seconds))
        return {
            structure: {size: min(each for other, each in by_size.items() if other >= size) for size in by_size}
            for structure, by_size in fastest.items()
        }

    def _scale(self, layer: Layer, limits: Limits, size: int) -> Scale:
        """Device time of a layer, relative to the roofline, from the devices that were the limit; 1 if none was.

        Layers that tensor-parallel ranks divide have the scale of one rank: with several ranks, late hosts and
        reductions are in the measurement. Undivided ones are scaled by their own measurement with as many ranks.
        """
        if layer.is_divided:
            size = 1
        found = []
        for measured in self.devices.values():
            seconds = measured.forward_s[layer.name].get(size, 0.0)
            limit = limits[_structure(layer)].get(size, np.inf)
            if seconds > CLEARLY * limit:
                found.append(Scale.reaching(*self._one_sequence_s(measured, layer, size), without(seconds, limit)))
        return max(found, key=lambda scale: (scale.moving, scale.products), default=Scale())

    def _take_apart(
        self, measured: MeasuredDevice, layer: Layer, scale: Mapping[int, Scale]
    ) -> tuple[Mapping[int, Scale], Mapping[int, float]]:
        """Scales of a layer on a device, and the host time of its forward, by tensor-parallel size."""
        scales, launch_s = {}, {}
        for size, seconds in measured.forward_s[layer.name].items():
            products, moving = self._one_sequence_s(measured, layer, size)
            one = self._one_reduction_s(measured, layer, np.asarray(float(size)), float(layer.tokens))
            reduced = float(one) * reductions(layer)[1]
            # No part takes longer than the whole.
            scales[size] = scale[size].within(products, moving, max(seconds - reduced, 0.0))
            computed = scales[size].products * products + scales[size].moving * moving
            launch_s[size] = without(seconds, computed + reduced)
        return scales, launch_s

    def _one_sequence_s(self, measured: MeasuredDevice, layer: Layer, size: int) -> tuple[float, float]:
        """Roofline's seconds of products, and of the rest, of the forward that was measured."""
        query = LayerQuery(
            layer,
            measured.device,
            tensor_parallel_size=np.asarray(float(size)),
            micro_batch_size=1.0,
            start=0.0,
            end=float(layer.tokens),
        )
        times = self._device_times(measured, query)
        return float(times.products), float(times.moving)

    def _one_reduction_s(
        self, measured: MeasuredDevice, layer: Layer, sizes: Numbers, rows: ScalarOrArray
    ) -> ScalarOrArray:
        """Seconds of one reduction between tensor-parallel ranks of one node."""
        topology = GroupTopology(sizes, 1.0, measured.inside.bandwidth, measured.inside.latency_s, 1.0, 0.0)
        return all_reduce_s(self.element_bytes * rows * layer.hidden_size, topology, measured.roofline.efficiency)

    def _device_times(self, measured: MeasuredDevice, query: LayerQuery) -> DeviceTimes:
        """Device times of a layer; equal layers are computed once."""
        sizes = query.tensor_parallel_size, query.micro_batch_size, query.start, query.end
        grids = tuple(np.asarray(grid, dtype=float).tobytes() for grid in sizes)
        key = (measured.device.name, _shapes(query.layer), *grids)
        times = self._computed.get(key)
        if times is None:
            times = self._computed[key] = device_times(measured.roofline, query)
        return times


def hidden(device_s: ScalarOrArray, launch_s: ScalarOrArray) -> ScalarOrArray:
    """Seconds of a device's work that a host launches ahead of it: about the longer of both; arguments broadcast."""
    longer, shorter = np.maximum(device_s, launch_s), np.minimum(device_s, launch_s)
    return longer * (1 + (shorter / np.maximum(longer, 1e-12)) ** HIDING) ** (1 / HIDING)


def without(whole_s: float, part_s: float) -> float:
    """Return the seconds of the other part of `whole_s`, given one part: the inverse of `hidden`."""
    share = min(part_s / whole_s, 1.0)
    return float(whole_s * (1 - share**HIDING) ** (1 / HIDING))


def _structure(layer: Layer) -> Structure:
    return layer.kind, len(layer.products), layer.attention is not None, layer.num_norms, layer.activation_width > 0


def _shapes(layer: Layer) -> tuple[object, ...]:
    sizes = layer.tokens, layer.hidden_size, layer.parameters, layer.num_norms, layer.activation_width, layer.gated
    return layer.kind, layer.products, layer.attention, *sizes


def _at(by_size: Mapping[int, float], sizes: Numbers) -> ScalarOrArray:
    if sizes.ndim == 0:
        return by_size[int(sizes)]
    known = sorted(by_size)
    return np.array([by_size[size] for size in known])[np.searchsorted(known, sizes)]
