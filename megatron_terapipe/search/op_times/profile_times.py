"""Op times from a measured profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.layer import Attention, Layer
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.op_times.layer_times import LayerQuery, LayerTimes, Numbers, ScalarOrArray
from megatron_terapipe.search.op_times.profile import Profile, ProfiledLayer, Shape, shape_in_words, shape_of
from megatron_terapipe.search.op_times.surface import Point, Surface


@dataclass(frozen=True, slots=True)
class _Surfaces:
    """The ops of one layer on one tensor-parallel size."""

    forward: Surface
    input_gradient: Surface
    weight_gradient: Surface

    def __call__(
        self, size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, parts: ScalarOrArray
    ) -> tuple[Numbers, Numbers, Numbers]:
        return (
            self.forward(size, start, end, parts=parts),
            self.input_gradient(size, start, end, parts=parts),
            self.weight_gradient(size, start, end, parts=parts),
        )


@dataclass(frozen=True)
class MeasuredProfile:
    """Times of layers as they were measured, interpolated; an `OpTimes`.

    A layer is known by its shape: times of one hidden size say nothing of another, and are refused. Sizes between
    measured ones are interpolated, as `Surface` says; over the tensor-parallel size, on logarithms. A tensor-parallel
    size beyond the largest measured divides all but the fixed time. Reductions between ranks are not in the times.

    With full recomputation the input gradient takes a forward more. With selective recomputation it takes what the
    profile has measured of that, or else what the roofline's rule would: a third of the forward.
    """

    profile: Profile
    """What was measured."""

    @property
    def includes_collectives(self) -> bool:
        """Each rank was measured alone."""
        return False

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`.

        Raises:
            ConfigError: if no layer of this shape was measured.
        """
        layer, start, end = query.layer, query.start, query.end
        if layer.attention is None:
            # Where a token slice begins means nothing to the layer: it was measured at the start of sequences.
            start, end = 0.0, np.subtract(end, start)
        sizes = query.tensor_parallel_size, query.sequences, start, end
        tensor, size, begin, stop = np.broadcast_arrays(*(np.asarray(each, float) for each in sizes))
        forward, of_input, of_weight = (np.empty(tensor.shape) for _ in range(3))
        for each in np.unique(tensor):
            mine = tensor == each
            times = self._on(layer, float(each), size[mine], begin[mine], stop[mine])
            forward[mine], of_input[mine], of_weight[mine] = times
            if layer.kind == "block" and query.recompute == "full":
                of_input[mine] += times[0]
            elif layer.kind == "block" and query.recompute == "selective":
                of_input[mine] += self._selective(layer, float(each), size[mine], begin[mine], stop[mine], times[0])
        return LayerTimes(forward[()], of_input[()], of_weight[()])

    def covers(self, workload: Workload) -> bool:
        """Whether every layer of a model was measured."""
        known = {each.shape for each in self.profile.layers if each.recompute == "none"}
        return all(shape_of(layer) in known for layer in workload.layers)

    def _on(
        self, layer: Layer, tensor: float, size: Numbers, start: Numbers, end: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Times on one tensor-parallel size: measured, between two, or beyond them."""
        known = sorted(self._known(layer))
        shape = shape_of(layer)
        below = max((each for each in known if each <= tensor), default=known[0])
        above = min((each for each in known if each >= tensor), default=known[-1])
        first = self._surfaces[shape, below](size, start, end, tensor / below if above == below else 1.0)
        if above == below:
            return first
        second = self._surfaces[shape, above](size, start, end, 1.0)
        weight = np.log(tensor / below) / np.log(above / below)
        return tuple(low ** (1 - weight) * high**weight for low, high in zip(first, second, strict=True))

    def _selective(
        self, layer: Layer, tensor: float, size: Numbers, start: Numbers, end: Numbers, forward: Numbers
    ) -> Numbers:
        """Seconds that selective recomputation adds to the input gradient."""
        shape = shape_of(layer)
        measured = [each for each, _ in self._extra if each == shape]
        sizes = [ranks for each, ranks in self._extra if each == shape]
        if not measured:
            return forward / 3
        nearest = min(sizes, key=lambda ranks: abs(np.log(ranks / tensor)))
        # Norms and activations are computed row by row: a token slice takes as long wherever it begins.
        return self._extra[shape, nearest](size, 0.0, np.subtract(end, start), parts=tensor / nearest)

    def _known(self, layer: Layer) -> dict[int, ProfiledLayer]:
        """Measured layers of a layer's shape, by tensor-parallel size."""
        shape = shape_of(layer)
        found = {
            each.tensor_parallel_size: each
            for each in self.profile.layers
            if each.shape == shape and each.recompute == "none"
        }
        if not found:
            kinds = [shape_in_words(each.shape) for each in self.profile.layers if each.shape[0] == layer.kind]
            there = f"; it has {', '.join(dict.fromkeys(kinds))}" if kinds else ""
            raise ConfigError(
                f"the profile {self.profile.source or 'just measured'} has no "
                f"{shape_in_words(shape).removeprefix('a ')}{there}: measure this model, or give no profile"
            )
        return found

    @cached_property
    def _surfaces(self) -> Mapping[tuple[Shape, int], _Surfaces]:
        return {
            (each.shape, each.tensor_parallel_size): _Surfaces(
                Surface.through([point.point("forward_s") for point in each.points], _window(each.shape)),
                Surface.through([point.point("input_gradient_s") for point in each.points], _window(each.shape)),
                Surface.through([point.point("weight_gradient_s") for point in each.points], _window(each.shape)),
            )
            for each in self.profile.layers
            if each.recompute == "none"
        }

    @cached_property
    def _extra(self) -> Mapping[tuple[Shape, int], Surface]:
        """Surfaces of the time that selective recomputation adds, by shape and tensor-parallel size."""

        def backward(layer: ProfiledLayer) -> dict[tuple[int, int, int], float]:
            return {point[:3]: point.input_gradient_s + point.weight_gradient_s for point in layer.points}

        plain = {
            (each.shape, each.tensor_parallel_size): backward(each)
            for each in self.profile.layers
            if each.recompute == "none"
        }
        found = {}
        for each in self.profile.layers:
            key = each.shape, each.tensor_parallel_size
            if each.recompute == "selective" and key in plain:
                more = {at: seconds - plain[key][at] for at, seconds in backward(each).items() if at in plain[key]}
                points = [Point(*at, max(seconds, 0.0)) for at, seconds in more.items() if at[1] == 0]
                if points:
                    found[key] = Surface.through(points)
        return found


def _window(shape: Shape) -> int | None:
    """Sliding window of a layer of a shape."""
    attention: Attention | None = shape[3]
    return None if attention is None else attention.sliding_window
