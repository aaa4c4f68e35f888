"""Op times from forwards that were measured at one micro-batch size: what of them the host took, and what the device.

A small forward takes as long as its host needs to launch it, however fast the device is, and does not take longer with
twice the sequences. Scaled in proportion, as AMP does, it would. One measurement alone does not say which it is; three
things together do:

  * layers of the same structure are launched by the same calls, so that the fastest of them, on whatever device, has
    an upper limit of the launch time in it;
  * where a layer takes clearly longer than that limit, its device is what takes the time;
  * what a roofline misses there (unfused element-wise work, kernels below their best) it misses on every device.

So the roofline gives the shape of the device's time over micro-batch size, tensor-parallel size and backward; the
measurement gives its scale where the device was the limit, and the launches where the host was.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_terapipe.errors import DataError
from megatron_terapipe.search.cluster import Device, Link
from megatron_terapipe.search.cost.collectives import Span, all_reduce_s
from megatron_terapipe.search.cost.op_times import Grid, LayerTimes
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.cost.roofline import Roofline
from megatron_terapipe.search.cost.stage_ops import reductions
from megatron_terapipe.search.workload import Layer, Workload

CLEARLY = 1.2
"""How many times the launch limit a measurement must be for its device to be the reason: where both are alike, their
difference says nothing."""

BACKWARD_LAUNCHES = 1.0
"""Host time of a backward in that of its forward: autograd launches about twice the kernels, from C++ instead of Python."""


Structure = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDevice:
    """A device on which all layers were measured.

    Attributes:
        device: its data sheet.
        roofline: its roofline.
        inside: link between the tensor-parallel ranks of the measurement.
        forward_s: seconds by layer name and tensor-parallel size, of the forward of one sequence, reductions included.
    """

    device: Device
    roofline: Roofline
    inside: Link
    forward_s: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class _Known:
    """What the measurements say of a layer on a device.

    Attributes:
        scale: device time in that of the roofline, by tensor-parallel size.
        launch_s: host time of the forward, by tensor-parallel size.
    """

    scale: Mapping[int, float]
    launch_s: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class MeasuredLayers:
    """Times of the layers of one model on devices that it was measured on; an `OpTimes`.

    Attributes:
        workload: the model; its layers have different names.
        devices: by name of the device.
        element_bytes: of an activation.
    """

    workload: Workload
    devices: Mapping[str, MeasuredDevice]
    element_bytes: int = 2
    _known: dict[tuple[str, str], _Known] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Take the measurements apart.

        Raises:
            DataError: if a layer was not measured.
        """
        for name, measured in self.devices.items():
            for layer in self.workload.layers:
                if not measured.forward_s.get(layer.name):
                    raise DataError(
                        f"profile of {name}: layer {layer.name!r} has no time: measure it, or name another profile"
                    )
        limits = self._launch_limits()
        scales = {layer.name: self._scale(layer, limits) for layer in self.workload.layers}
        for name, measured in self.devices.items():
            for layer in self.workload.layers:
                self._known[name, layer.name] = self._take_apart(measured, layer, scales[layer.name])

    @property
    def includes_collectives(self) -> bool:
        """They are taken out of the measurement, because they grow with the micro-batch and launches do not."""
        return False

    def __call__(
        self,
        layer: Layer,
        device: Device,
        *,
        tensor_parallel_size: Grid,
        micro_batch_size: Grid,
        start: Grid,
        end: Grid,
        recompute: str = "none",
        sequence_parallel: bool = False,
    ) -> LayerTimes:
        """Times of one layer; see `OpTimes`.

        Raises:
            DataError: if it was not measured on this device, or not with this tensor-parallel size.
        """
        measured = self.devices.get(device.name)
        if measured is None:
            raise DataError(f"no profile of {device.name}: profiles are of {', '.join(self.devices)}")
        known = self._known[device.name, layer.name]
        sizes = np.asarray(tensor_parallel_size)
        missing = sorted(set(np.unique(sizes).tolist()) - set(known.scale))
        if missing:
            raise DataError(
                f"profile of {device.name}: layer {layer.name!r} was not measured with tensor-parallel size "
                f"{missing[0]:g}, only with {', '.join(map(str, known.scale))}"
            )
        sharing = _ranks_that_share(layer, tensor_parallel_size)
        given = {"micro_batch_size": micro_batch_size, "start": start, "end": end}
        how = {"recompute": recompute, "sequence_parallel": sequence_parallel}
        times = measured.roofline(layer, device, tensor_parallel_size=sharing, **given, **how)
        without = measured.roofline(_without_loss(layer), device, tensor_parallel_size=sharing, **given, **how)
        scale, launch = _at(known.scale, sizes), _at(known.launch_s, sizes)
        backward = BACKWARD_LAUNCHES * launch / 2
        repeated = launch if recompute == "full" else 0.0
        # The loss is no pipeline layer, so that nobody measured it: the roofline's time of it stands.
        return LayerTimes(
            without.forward * scale + (times.forward - without.forward),
            without.input_gradient * scale + (times.input_gradient - without.input_gradient),
            without.weight_gradient * scale,
            launch,
            backward + repeated,
            backward,
        )

    def _launch_limits(self) -> Mapping[Structure, Mapping[int, float]]:
        """By structure: seconds that launching takes at most, by tensor-parallel size.

        More tensor-parallel ranks launch the same kernels and reductions besides.
        """
        fastest: dict[Structure, dict[int, float]] = defaultdict(dict)
        for measured in self.devices.values():
            for layer in self.workload.layers:
                of_structure = fastest[_structure(layer)]
                for size, seconds in measured.forward_s[layer.name].items():
                    of_structure[size] = min(seconds, of_structure.get(size, seconds))
        return {
            structure: {size: min(each for other, each in by_size.items() if other >= size) for size in by_size}
            for structure, by_size in fastest.items()
        }

    def _scale(self, layer: Layer, limits: Mapping[Structure, Mapping[int, float]]) -> float:
        """Device time of a layer in that of the roofline, from the devices that were the limit; 1 if none was."""
        found = []
        for measured in self.devices.values():
            seconds = measured.forward_s[layer.name]
            limit = limits[_structure(layer)]
            computed = float(_one_sequence(measured, layer, 1))
            if 1 in seconds and computed > 0 and seconds[1] > CLEARLY * limit[1]:
                found.append(_without(seconds[1], limit[1], measured.roofline.physics.hiding) / computed)
        return max(found, default=1.0)

    def _take_apart(self, measured: MeasuredDevice, layer: Layer, scale: float) -> _Known:
        scales, launches = {}, {}
        for size, seconds in measured.forward_s[layer.name].items():
            computed = float(_one_sequence(measured, layer, size))
            reduced = self._reductions_s(measured, layer, size)
            # What was measured is the limit of what is computed.
            scales[size] = min(scale, max(seconds - reduced, 0.1 * seconds) / computed) if computed > 0 else 1.0
            launches[size] = _without(seconds, scales[size] * computed + reduced, measured.roofline.physics.hiding)
        return _Known(scales, launches)

    def _reductions_s(self, measured: MeasuredDevice, layer: Layer, size: int) -> float:
        """Seconds of the reductions in one measured forward."""
        num_bytes = self.element_bytes * layer.output_elements
        span = Span(size, 1, measured.inside.bandwidth, measured.inside.latency_s, 1.0, 0.0)
        return float(reductions(layer)[1] * all_reduce_s(num_bytes, span, measured.roofline.physics))

    @property
    def physics(self) -> Mapping[str, Physics]:
        """Of each device, for tables."""
        return {name: measured.roofline.physics for name, measured in self.devices.items()}


def _structure(layer: Layer) -> Structure:
    """What the calls that launch a layer hang on; sizes do not matter."""
    return layer.kind, len(layer.products), layer.attention is not None, layer.num_norms, layer.activation_width > 0


def _ranks_that_share(layer: Layer, tensor_parallel_size: Grid) -> Grid:
    """Tensor-parallel ranks among which a layer is divided: none where no matrix is."""
    if layer.products and all(product.parallel == "none" for product in layer.products):
        return np.ones_like(np.asarray(tensor_parallel_size, dtype=float))
    return tensor_parallel_size


def _one_sequence(measured: MeasuredDevice, layer: Layer, size: int) -> Grid:
    """Roofline's seconds of the forward of one sequence, as it was measured: without the loss."""
    return measured.roofline(
        _without_loss(layer),
        measured.device,
        tensor_parallel_size=_ranks_that_share(layer, float(size)),
        micro_batch_size=1.0,
        start=0.0,
        end=float(layer.tokens),
    ).forward


def _without_loss(layer: Layer) -> Layer:
    """The head as a matrix product alone."""
    return replace(layer, kind="other") if layer.kind == "head" else layer


def _without(whole_s: float, part_s: float, hiding: float) -> float:
    """The other part of what takes `whole_s` where launching and computing hide each other; see `stage_ops.hidden`."""
    share = min(part_s / whole_s, 1.0)
    return float(whole_s * (1 - share**hiding) ** (1 / hiding))


def _at(by_size: Mapping[int, float], sizes: "np.ndarray") -> Grid:
    if sizes.ndim == 0:
        return by_size[int(sizes)]
    known = sorted(by_size)
    return np.array([by_size[size] for size in known])[np.searchsorted(known, sizes)]
