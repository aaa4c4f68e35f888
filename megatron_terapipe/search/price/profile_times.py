"""The profile of a machine, and op times from it: seconds of an op through measured points.

    measured points --Surface--> seconds of (micro-batch, token slice) --MeasuredProfile--> LayerTimes

Between points the times follow the terms that an op has,

    fixed + linear R + quadratic B positions + prefix B before        R = B (end - start) rows of B sequences

with the positions that tokens attend to (`config.model.attended_positions`) and the tokens in reach before the token
slice. The coefficients, none below zero, are fitted to all points. Few points do not determine all terms: one point
determines one. Then only the first terms of `PREFERRED` that the points determine are fitted, so that times through a
single point are proportional to the rows, and not constant. The ratio of each point to the fit is a factor,
and the logarithm of that factor is interpolated: over the start of the token slice, then over its length,
then over the micro-batch, each time linearly in the logarithm of the fit between the points. So the surface goes
through the points, and is monotonic between points that are; beyond the last point the factor is constant.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config.flops import attended_positions, positions_in_reach
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.machine.library import names_one_device
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, carried_by_network, reachable_bandwidth
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes, Numbers, ScalarOrArray
from megatron_terapipe.search.price.profile import LayerShape, Profile, ProfiledLayer, ProfiledLink, sizes_measured_once
from megatron_terapipe.search.price.workload import Layer, Workload

Whole = NDArray[np.int64]

PREFERRED = (1, 0, 2, 3)
"""Columns of `terms` in the order in which they are fitted: most of the time of an op is proportional to its rows."""

TINY_S = 1e-9
"""Least seconds of an op: logarithms need a floor."""


class Point(NamedTuple):
    """One measured op."""

    micro_batch_size: int
    start: int
    end: int
    seconds: float


def terms(
    micro_batch_size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, window: int | None = None
) -> tuple[ScalarOrArray, ...]:
    """Terms of an op without their coefficients; arguments broadcast."""
    begin, stop = np.asarray(start), np.asarray(end)
    rows = np.multiply(micro_batch_size, stop - begin)
    positions = micro_batch_size * attended_positions(begin, stop, window)
    before = micro_batch_size * (positions_in_reach(begin, stop, window) - (stop - begin))
    return np.ones_like(rows, dtype=float), rows, positions, before


Measured = Mapping[float, tuple[Numbers, Numbers]]
"""Points of one micro-batch size: starts of token slices and logarithms of factors, by length."""


@dataclass(frozen=True, slots=True)
class Surface:
    """Times of one op; see above."""

    coefficients: Numbers
    """[4] of the fitted terms."""
    by_size: Mapping[float, Measured]
    """By micro-batch size."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""

    @classmethod
    def through(cls, points: Sequence[Point], window: int | None = None) -> "Surface":
        """Fit a surface through points.

        A point that took longer than one that is larger in every way is noise: both are moved to their mean first.
        """
        seconds = np.maximum(np.array([point.seconds for point in points], dtype=float), TINY_S)
        sizes, starts, ends = (np.array([point[axis] for point in points]) for axis in range(3))
        seconds = _monotonic(sizes, starts, ends - starts, seconds)
        plain = cls(_fit(np.stack(terms(sizes, starts, ends, window), axis=1), seconds), {}, window)
        log_factors = np.log(seconds / plain._fitted(sizes, starts, ends))
        found: dict[float, dict[float, tuple[Numbers, Numbers]]] = defaultdict(dict)
        for size, length in sorted({*zip(sizes.tolist(), (ends - starts).tolist(), strict=True)}):
            rows = np.flatnonzero((sizes == size) & (ends - starts == length))
            rows = rows[np.argsort(starts[rows])]
            found[size][length] = starts[rows].astype(float), log_factors[rows]
        return replace(plain, by_size=found)

    def __call__(
        self, micro_batch_size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, *, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        """Seconds; arguments broadcast. All but the fixed time is cut into `parts`, for more ranks than measured."""
        size, begin, stop = np.broadcast_arrays(*(np.asarray(each, float) for each in (micro_batch_size, start, end)))
        factors = [self._log_factor(*each, begin, stop) for each in self.by_size.items()]
        log_factor = _between([*self.by_size], size, np.stack(factors), lambda each: self._fitted(each, begin, stop))
        return self._fitted(size, begin, stop, parts) * np.exp(log_factor)

    def _fitted(
        self, size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        fixed, *others = map(np.multiply, self.coefficients, terms(size, start, end, self.window))
        return cast(Numbers, np.maximum(fixed + sum(others) / parts, TINY_S))

    def _log_factor(self, size: float, measured: Measured, start: Numbers, end: Numbers) -> Numbers:
        """Logarithm of measured over fitted time, for micro-batches of a measured size."""
        length = end - start

        def fitted(length: ScalarOrArray) -> Numbers:
            return self._fitted(size, start, start + length)

        of_lengths = [
            np.interp(np.log(fitted(each)), np.log(self._fitted(size, known, known + each)), factors)
            for each, (known, factors) in measured.items()
        ]
        return _between([*measured], length, np.stack(of_lengths), fitted)


def _between(
    measured: Sequence[float], wanted: Numbers, values: Numbers, fitted: Callable[[ScalarOrArray], Numbers]
) -> Numbers:
    """Interpolate `values` [K, ...] of K measured sizes by the logarithm of the fit."""
    knots = np.array(measured, dtype=float)
    above = np.clip(np.searchsorted(knots, wanted), 0, len(knots) - 1)
    below = np.where(knots[above] <= wanted, above, np.maximum(above - 1, 0))
    low, high = np.log(fitted(knots[below])), np.log(fitted(knots[above]))
    here = np.log(fitted(np.clip(wanted, knots[0], knots[-1])))
    weight = np.divide(here - low, high - low, out=np.zeros_like(here), where=high - low > 1e-12)
    first = np.take_along_axis(values, below[None], 0)[0]
    second = np.take_along_axis(values, above[None], 0)[0]
    return cast(Numbers, first + weight * (second - first))


def _fit(features: NDArray[np.float64], seconds: Numbers) -> Numbers:
    from scipy.optimize import nnls

    relative = features / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), TINY_S)
    relative = relative / scale
    # Columns [4] that are linearly independent of those before them in the order of preference.
    columns: list[int] = []
    for column in PREFERRED:
        if np.linalg.matrix_rank(relative[:, [*columns, column]]) > len(columns):
            columns.append(column)
    found: Numbers = np.zeros(len(scale))
    found[columns] = nnls(relative[:, columns], np.ones(len(seconds)))[0] / scale[columns]
    return found


def _monotonic(sizes: Whole, starts: Whole, lengths: Whole, seconds: Numbers) -> Numbers:
    """Make times monotonic in the start and the length of token slices and in the number of sequences."""
    from scipy.optimize import isotonic_regression

    logs = np.log(seconds)
    axes = [(sizes, lengths, starts), (sizes, starts, lengths), (starts, lengths, sizes)]
    for *same, along in axes:
        lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index in range(len(logs)):
            lines[tuple(int(axis[index]) for axis in same)].append(index)
        for line in lines.values():
            order = sorted(line, key=lambda index: int(along[index]))
            logs[order] = isotonic_regression(logs[order]).x
    return np.exp(logs)


@dataclass(frozen=True)
class MeasuredProfile:
    """Times of layers as they were measured, interpolated; an `OpTimes`.

    A layer is identified by its shape: other shapes than the measured ones are refused. Sizes between measured ones are
    interpolated (`Surface`); over the tensor-parallel size, on logarithms. A tensor-parallel size beyond the largest
    measured one divides all but the fixed time. Reductions between ranks are not in the times.

    Full recomputation adds a forward to the input gradient. Selective recomputation adds the measured time, or a third
    of the forward where it was not measured.
    """

    profile: Profile

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        layer, start, end = query.layer, query.start, query.end
        if layer.attention is None:
            # The start of a token slice has no effect on the layer: it was measured at the start of sequences.
            start, end = 0.0, np.subtract(end, start)
        full, selective = query.again("full"), query.again("selective")
        sizes = query.tensor_parallel_size, query.sequences, start, end
        tensor, size, begin, stop = np.broadcast_arrays(*(np.asarray(each, float) for each in sizes))
        forward, of_input, of_weight, again = (np.zeros(tensor.shape) for _ in range(4))
        for each in np.unique(tensor):
            mine = tensor == each
            times = self._on(layer, float(each), size[mine], begin[mine], stop[mine])
            forward[mine], of_input[mine], of_weight[mine] = times
            if np.any(selective):
                again[mine] = self._selective(layer, float(each), size[mine], begin[mine], stop[mine], times[0])
        return LayerTimes(forward[()], of_input + full * forward + selective * again, of_weight[()])

    def covers(self, workload: Workload) -> bool:
        """Whether every layer of a model was measured."""
        known = {each.shape for each in self.profile.layers if each.recompute == "none"}
        return all(layer.experts is None and LayerShape.of(layer) in known for layer in workload.layers)

    def _on(self, layer: Layer, tensor: float, size: Numbers, start: Numbers, end: Numbers) -> list[Numbers]:
        """Times on one tensor-parallel size: measured, between two, or beyond them."""
        shape, known = LayerShape.of(layer), self._measured_sizes(layer)
        below = max((each for each in known if each <= tensor), default=known[0])
        above = min((each for each in known if each >= tensor), default=known[-1])

        def at(measured: int, parts: float) -> list[Numbers]:
            return [surface(size, start, end, parts=parts) for surface in self._surfaces[shape, measured]]

        first = at(below, tensor / below if above == below else 1.0)
        if above == below:
            return first
        weight = np.log(tensor / below) / np.log(above / below)
        return [low ** (1 - weight) * high**weight for low, high in zip(first, at(above, 1.0), strict=True)]

    def _selective(
        self, layer: Layer, tensor: float, size: Numbers, start: Numbers, end: Numbers, forward: Numbers
    ) -> Numbers:
        shape = LayerShape.of(layer)
        sizes = [ranks for each, ranks in self._extra if each == shape]
        if not sizes:
            return forward / 3
        nearest = min(sizes, key=lambda ranks: abs(np.log(ranks / tensor)))
        # Norms and activations are computed row by row: a token slice takes as long wherever it begins.
        return self._extra[shape, nearest](size, 0.0, np.subtract(end, start), parts=tensor / nearest)

    def _measured_sizes(self, layer: Layer) -> list[int]:
        """Tensor-parallel sizes at which layers of this shape were measured."""
        if layer.never_measured is not None and self.profile.own_model is None:
            raise ConfigError(f"{layer.never_measured} are not measured, and the model has some: drop --profile")
        shape = LayerShape.of(layer)
        found = sorted(ranks for each, ranks in self._surfaces if each == shape)
        if not found:
            kinds = dict.fromkeys(str(each.shape) for each in self.profile.layers if each.shape.kind == layer.kind)
            there = f"; it has {', '.join(kinds)}" if kinds else ""
            raise ConfigError(
                f"the profile {self.profile.source or 'just measured'} has no "
                f"{str(shape).partition(' ')[2]}{there}: measure this model, or give no profile"
            )
        return found

    @cached_property
    def _surfaces(self) -> Mapping[tuple[LayerShape, int], tuple[Surface, ...]]:
        return {
            (each.shape, each.tensor_parallel_size): tuple(
                Surface.through([Point(*point[:3], point[op]) for point in each.points], each.shape.sliding_window)
                for op in (3, 4, 5)
            )
            for each in self.profile.layers
            if each.recompute == "none"
        }

    @cached_property
    def _extra(self) -> Mapping[tuple[LayerShape, int], Surface]:
        """Surfaces of the time that selective recomputation adds, by shape and tensor-parallel size."""

        def backward(layer: ProfiledLayer) -> dict[tuple[int, int, int], float]:
            return {point[:3]: point.input_gradient_s + point.weight_gradient_s for point in layer.points}

        layers = {
            (each.shape, each.tensor_parallel_size, each.recompute): backward(each) for each in self.profile.layers
        }
        found = {}
        for (shape, size, recompute), seconds in layers.items():
            plain = layers.get((shape, size, "none"), {})
            shared = [at for at in seconds if recompute == "selective" and at in plain and at[1] == 0]
            if shared:
                points = [Point(*at, max(seconds[at] - plain[at], 0.0)) for at in shared]
                found[shape, size] = Surface.through(points)
        return found


ENGINE_ZERO_STAGE = 1
"""ZeRO stage that engines are measured under (`search.measure.layers`)."""

LEAST_S = 1e-7
"""Least seconds to start a message."""


class Line(NamedTuple):
    """Seconds of a message: `start_s + num_bytes * byte_s`."""

    start_s: float
    byte_s: float


def measured_efficiency(
    profile: Profile, cluster: Cluster, efficiency: HardwareEfficiency | None = None, software: Software = TERAPIPE
) -> HardwareEfficiency:
    """Return the efficiency with the measured constants of a profile; the others are unchanged.

    Several measurements of a kind of link have equal weight: one group, and several that share the cards of a node. Of
    several kinds of nodes the first with measured devices counts.
    """
    efficiency = efficiency or HardwareEfficiency()
    node = measured_node(profile, measured_cluster(profile, cluster))
    values: dict[str, float] = {}
    for where in ("inside", "network"):
        links = [link for link in profile.links_of(where) if not _is_bound_inside(link, profile)]
        for name, what in ((f"transfer_{where}_efficiency", "transfer"), (f"{where}_efficiency", "all_reduce")):
            if reached := [_share_reached(link, node) for link in links if link.what == what]:
                values[name] = geometric_mean(reached)
    starts = {"transfer_s": _transfer_start(profile, node), "collective_s": _collective_start(profile, node)}
    values |= {name: start for name, start in starts.items() if start is not None}
    if starts["collective_s"] is not None:
        values["collective_fill_s"] = 0.0
    if profile.engine is not None:
        reached_bytes = reachable_bandwidth(node.device) * efficiency.memory_efficiency
        moved = profile.engine.optimizer_s_per_parameter * reached_bytes
        fixed = software.state(profile.precision, ENGINE_ZERO_STAGE).whole_step
        values["optimizer_passes"] = max((moved - fixed) / software.step_bytes, LEAST_S)
        values["iteration_s"] = max(profile.engine.iteration_s, LEAST_S)
        values["op_s"] = profile.engine.op_s
    return replace(efficiency, **values)  # type: ignore[arg-type]


def measured_cluster(profile: Profile, cluster: Cluster) -> Cluster:
    """Return the cluster with the measured latency of the network.

    Nodes with another network than the measured node keep their latency, as it was not measured.
    """
    first = measured_node(profile, cluster)
    transfers = [link for link in profile.links_of("network") if link.what == "transfer" and link.flows == 1]
    if not transfers:
        return cluster
    start = _transfer_start(profile, first)
    # Without a measurement inside a node, the start of a message cannot be separated from the latency.
    latency = max(message_line(transfers[0].points).start_s - (start or HardwareEfficiency().transfer_s), LEAST_S)
    network = replace(first.network, latency_s=latency)
    nodes = (replace(node, network=network) if node.network == first.network else node for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def measured_node(profile: Profile, cluster: Cluster) -> Node:
    """Return the first node with devices of the kind that a profile was measured on; the first of all if none has."""
    return next((node for node in cluster.nodes if _has_measured_devices(node, profile)), cluster.nodes[0])


def profile_notes(profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Yield the file of a profile, and lines about links that ranks of a cluster use, and sizes, not measured."""
    name = profile.source or "the profile"
    if profile.source:
        yield f"op times and links are those of {profile.source}"
    if profile.own_model is not None:
        yield (
            f"{name} was measured on the layers of {profile.own_model}: sizes of memory, parameters and messages are "
            "those of a GPT of the same flags"
        )
    others = dict.fromkeys(node.device.name for node in cluster.nodes if not _has_measured_devices(node, profile))
    if others:
        yield (
            f"{name} was measured on {profile.device}: ops on {' and '.join(others)} are priced as if they took as long"
        )
    if len(cluster.nodes) > 1 and not profile.links_of("network"):
        yield (
            f"{name} was measured on one host: links between hosts are those of the data sheet; measure --hostfile "
            "measures them"
        )
    largest = max(node.num_devices for node in cluster.nodes)
    if largest > 1 and not profile.links_of("inside"):
        yield f"{name} was measured with one rank on a host: links inside a node are those of the data sheet"
    elif largest > profile.num_devices:
        yield (
            f"{name} was measured with {profile.num_devices} ranks on a host, and nodes have up to {largest}: "
            f"contention of {largest} ranks on a node was not measured"
        )
    for sizes in sizes_measured_once(profile):
        yield (
            f"{name} was measured only with {sizes}: op times of others are a guess; measure more sizes, or with a "
            "longer --budget-s"
        )


def message_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit start and time per byte to messages, relative errors small, neither below zero."""
    from scipy.optimize import nnls

    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    features = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), 1e-30)
    (start, byte), _ = nnls(features / scale, np.ones(len(sizes)))
    return Line(max(float(start / scale[0]), LEAST_S), max(float(byte / scale[1]), 1e-15))


def _has_measured_devices(node: Node, profile: Profile) -> bool:
    """Whether a profile was measured on devices of the kind of a node's: processors are all one kind."""
    if profile.accelerator == "cpu" or not node.device.is_gpu:
        return (profile.accelerator == "cpu") is not node.device.is_gpu
    return names_one_device(node.device.name, profile.device)


def _share_reached(link: ProfiledLink, node: Node) -> float:
    """Share of the data sheet that a group reached, others sharing the cards of its nodes (`RankGroups`)."""
    rounds, bandwidth, num_nodes = 1.0, node.inside.bandwidth, 1
    if link.where == "network":
        bandwidth = node.network.bandwidth * min(node.num_network_cards / link.flows, link.ranks_per_node)
        num_nodes = link.num_ranks // link.ranks_per_node
    if link.what == "all_reduce":
        rounds = 2 * float(carried_by_network(link.num_ranks, num_nodes))
    return rounds / (message_line(link.points).byte_s * bandwidth)


def _is_bound_inside(link: ProfiledLink, profile: Profile) -> bool:
    """Whether an all-reduce over nodes took no longer than one inside them, and so does not measure the network."""
    if link.where == "inside" or link.what == "transfer" or link.ranks_per_node == 1:
        return False
    inside = [message_line(each.points).byte_s for each in profile.links_of("inside") if each.what == link.what]
    return bool(inside) and message_line(link.points).byte_s <= 1.1 * max(inside)


def _transfer_start(profile: Profile, node: Node) -> float | None:
    """Seconds to start a message between stages, in addition to the latency of its link; None if unknown."""
    lines = [message_line(link.points) for link in profile.links_of("inside") if link.what == "transfer"]
    return max(lines[0].start_s - node.inside.latency_s, LEAST_S) if lines else None


def _collective_start(profile: Profile, node: Node) -> float | None:
    """Seconds to start a collective, in addition to the latencies of its links; None if none was measured."""
    sums = [link for link in profile.links if link.what == "all_reduce"]
    # One inside a node is the most accurate: latency is small there.
    for link in sorted(sums, key=lambda each: (each.where, each.flows, each.ranks_per_node)):
        nodes = 1 if link.where == "inside" else max(link.num_ranks // link.ranks_per_node, 1)
        inside_steps = (link.num_ranks if nodes == 1 else link.ranks_per_node) - 1
        latency = inside_steps * node.inside.latency_s + np.log2(nodes) * node.network.latency_s
        return max(message_line(link.points).start_s - 2 * float(latency), LEAST_S)
    return None
