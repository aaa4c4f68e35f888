"""The profile of a machine, and op times from it: seconds of an op through measured points.

    measured points --Surface--> seconds of (micro-batch, token slice) --MeasuredProfile--> LayerTimes

Between points the times follow the terms that an op has,

    fixed + linear R + quadratic B positions + prefix B before        R = B (end - start) rows of B sequences

with the positions that tokens attend to (`config.model.attended_positions`) and the tokens in reach before the token
slice, whose coefficients, none below zero, are fitted to all points. Few points do not tell all terms apart: one is
met by any term alone. Then only the first terms of `PREFERRED` that they tell apart are fitted, so a single point
says that times grow with the rows, not that they are fixed (ADR 61). What the points differ from the fit by is a
factor, and the logarithm of that factor is interpolated: over the start of the token slice, then over its length,
then over the micro-batch, each time by how far the logarithm of the fit has come from one point to the next. So the
surface goes through the points, and where they grow from one to the next, so does it between them; beyond the last
point the factor stays what it was.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.config.flops import attended_positions, positions_in_reach
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes, Numbers, ScalarOrArray
from megatron_terapipe.search.price.workload import Attention, Layer, Workload

Whole = NDArray[np.int64]

PREFERRED = (1, 0, 2, 3)
"""Columns of `terms`, fitted where points tell them from those before: most of the time of an op goes into its rows."""

TINY_S = 1e-9
"""Seconds below which an op takes no time: logarithms need a floor."""


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


@dataclass(frozen=True, slots=True)
class _Lengths:
    """The points of one micro-batch size: their lengths, and for each its starts and factors."""

    lengths: Numbers
    starts: tuple[Numbers, ...]
    log_factors: tuple[Numbers, ...]


@dataclass(frozen=True, slots=True)
class Surface:
    """Times of one op; see above."""

    coefficients: Numbers
    """[4] of the fitted terms."""
    sizes: Numbers
    """[M] micro-batch sizes that were measured."""
    by_size: tuple[_Lengths, ...]
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""

    @classmethod
    def through(cls, points: Sequence[Point], window: int | None = None) -> "Surface":
        """Fit a surface through points.

        A point that took longer than one that is larger in every way is noise: both are moved to their mean first.
        """
        seconds = np.maximum(np.array([point.seconds for point in points], dtype=float), TINY_S)
        sizes, starts, ends = (np.array([point[axis] for point in points]) for axis in range(3))
        seconds = _growing(sizes, starts, ends - starts, seconds)
        coefficients = _fit(np.stack(terms(sizes, starts, ends, window), axis=1), seconds)
        log_factors = np.log(seconds / _fitted(coefficients, sizes, starts, ends, window=window))
        found = []
        for size in np.unique(sizes):
            lengths = np.unique((ends - starts)[sizes == size])
            rows = [np.flatnonzero((sizes == size) & (ends - starts == length)) for length in lengths]
            rows = [row[np.argsort(starts[row])] for row in rows]
            found.append(
                _Lengths(
                    lengths.astype(float),
                    tuple(starts[row].astype(float) for row in rows),
                    tuple(log_factors[row] for row in rows),
                )
            )
        return cls(coefficients, np.unique(sizes).astype(float), tuple(found), window)

    def __call__(
        self, micro_batch_size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, *, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        """Seconds; arguments broadcast.

        Args:
            parts: into how many equal parts all but the fixed time is cut, for more ranks than were measured.
        """
        size, begin, stop = np.broadcast_arrays(*(np.asarray(each, float) for each in (micro_batch_size, start, end)))
        by_size = [
            self._log_factor(each, held, begin, stop) for each, held in zip(self.sizes, self.by_size, strict=True)
        ]
        log_factor = _between(self.sizes, size, np.stack(by_size), lambda each: self._fitted(each, begin, stop))
        return self._fitted(size, begin, stop, parts) * np.exp(log_factor)

    def _fitted(
        self, size: ScalarOrArray, start: ScalarOrArray, end: ScalarOrArray, parts: ScalarOrArray = 1.0
    ) -> Numbers:
        return _fitted(self.coefficients, size, start, end, parts, window=self.window)

    def _log_factor(self, size: float, held: _Lengths, start: Numbers, end: Numbers) -> Numbers:
        """Logarithm of measured over fitted time, for micro-batches of a measured size."""
        length = end - start

        def fitted(length: ScalarOrArray) -> Numbers:
            return self._fitted(size, start, start + length)

        of_lengths = [
            np.interp(np.log(fitted(each)), np.log(self._fitted(size, known, known + each)), factors)
            if len(known) > 1
            else np.full(length.shape, factors[0])
            for each, known, factors in zip(held.lengths, held.starts, held.log_factors, strict=True)
        ]
        return _between(held.lengths, length, np.stack(of_lengths), fitted)


def _between(knots: Numbers, wanted: Numbers, values: Numbers, fitted: Callable[[ScalarOrArray], Numbers]) -> Numbers:
    """Interpolate `values` [K, ...], given at `knots` [K], by the logarithm of what is fitted there."""
    above = np.clip(np.searchsorted(knots, wanted), 0, len(knots) - 1)
    below = np.where(knots[above] <= wanted, above, np.maximum(above - 1, 0))
    low, high = np.log(fitted(knots[below])), np.log(fitted(knots[above]))
    here = np.log(fitted(np.clip(wanted, knots[0], knots[-1])))
    # Where the fit does not grow at all, by the logarithm of the size itself.
    flat = high - low < 1e-12
    log_low, log_high = np.log(knots[below]), np.log(knots[above])
    by_size = np.divide(
        np.log(np.clip(wanted, knots[0], knots[-1])) - log_low,
        log_high - log_low,
        out=np.zeros_like(here),
        where=log_high > log_low,
    )
    by_fit = np.divide(here - low, high - low, out=np.zeros_like(here), where=~flat)
    weight = np.where(flat, by_size, by_fit)
    first = np.take_along_axis(values, below[None], 0)[0]
    second = np.take_along_axis(values, above[None], 0)[0]
    return cast(Numbers, first + weight * (second - first))


def _fitted(
    coefficients: Numbers,
    size: ScalarOrArray,
    start: ScalarOrArray,
    end: ScalarOrArray,
    parts: ScalarOrArray = 1.0,
    *,
    window: int | None = None,
) -> Numbers:
    fixed, *others = map(np.multiply, coefficients, terms(size, start, end, window))
    return cast(Numbers, np.maximum(fixed + sum(others) / parts, TINY_S))


def _fit(features: NDArray[np.float64], seconds: Numbers) -> Numbers:
    """Coefficients, none below zero, that make relative errors small."""
    from scipy.optimize import nnls

    relative = features / seconds[:, None]
    scale = np.maximum(relative.max(axis=0), TINY_S)
    relative = relative / scale
    columns = _told_apart(relative)
    found: Numbers = np.zeros(len(scale))
    found[columns] = nnls(relative[:, columns], np.ones(len(seconds)))[0] / scale[columns]
    return found


def _told_apart(features: NDArray[np.float64]) -> list[int]:
    """Columns of features [n, 4] that no others before them in the order of preference add up to."""
    chosen: list[int] = []
    for column in PREFERRED:
        if np.linalg.matrix_rank(features[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
    return chosen


def _growing(sizes: Whole, starts: Whole, lengths: Whole, seconds: Numbers) -> Numbers:
    """Times that never fall where a token slice begins later, is longer, or has more sequences."""
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
    # What most layers do not have is not in their entries.
    more: dict[str, Any] = {"normed_heads": True} if attention and attention.normed else {}
    if attention and attention.sliding_window is not None:
        more["sliding_window"] = attention.sliding_window
    if attention and attention.written_out:
        more["written_out"] = True
    return {
        "kind": kind,
        "hidden_size": hidden_size,
        "products": [[each.inputs, each.outputs, each.parallel] for each in products],
        "attention": attention and [attention.query_heads, attention.key_value_heads, attention.head_size],
        **more,
        "num_norms": num_norms,
        "activation_width": activation_width,
        "gated": gated,
    }


def shape_in_words(shape: Shape) -> str:
    """For errors."""
    kind, hidden_size, products, attention, *_ = shape
    heads = f", {attention.query_heads} heads" if attention else ""
    if attention and attention.sliding_window is not None:
        heads += f" in a window of {attention.sliding_window}"
    vocabulary = f", {products[0].outputs} outputs" if kind == "head" else ""
    width = f", MLP of {shape[5]}" if kind == "block" else ""
    return f"a {kind} of hidden size {hidden_size}{heads}{width}{vocabulary}"


class OpPoint(NamedTuple):
    """The measured ops of one token slice of one micro-batch, in one layer."""

    micro_batch_size: int
    start: int
    end: int
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    """BW; both together are what the backward takes in one piece."""

    def point(self, op: Literal["forward_s", "input_gradient_s", "weight_gradient_s"]) -> Point:
        """One of the ops."""
        return Point(self.micro_batch_size, self.start, self.end, getattr(self, op))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLayer:
    """A layer as one tensor-parallel rank computes it; reductions between ranks are not in the times."""

    shape: Shape
    tensor_parallel_size: int
    recompute: Literal["none", "selective"]
    points: tuple[OpPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLink:
    """Messages of several sizes over one kind of link."""

    where: Literal["inside", "network"]
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` among the ranks of a group, or `transfer` from one to another."""
    num_ranks: int
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds)."""
    ranks_per_node: int = 1
    flows: int = 1
    """Groups that used the links of a node at the same time; of the network, they share its cards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledEngine:
    """Time of the engine beside the layers, in seconds."""

    op_s: float
    """Between two ops of a rank: programs, buffers, the executor."""
    optimizer_s_per_parameter: float
    """Norm of the gradient and optimizer step."""
    iteration_s: float
    """An iteration, however small it is."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured profile."""

    source: str = ""
    """The file, for errors; empty if it was just measured."""
    device: str
    """Name of the accelerator, or of the processor."""
    accelerator: str
    """What DeepSpeed calls it: cuda, cpu, ..."""
    num_devices: int
    """Ranks of a node that computed at the same time, one on each device."""
    precision: str
    software: tuple[tuple[str, str], ...]
    layers: tuple[ProfiledLayer, ...]
    links: tuple[ProfiledLink, ...] = ()
    engine: ProfiledEngine | None = None
    """What else an iteration takes; None if it was not measured."""
    num_nodes: int = 1
    """Nodes that took part; with one, nothing was measured of the network."""


def lone_sizes(profile: Profile) -> Iterator[str]:
    """Yield, in words, micro-batches and token slices of which one size alone was measured: all others are a guess."""
    found: dict[str, list[int]] = defaultdict(list)
    for layer in profile.layers:
        if layer.shape[0] == "block" and layer.recompute == "none":
            rows = {point.micro_batch_size for point in layer.points}
            lengths = {point.end - point.start for point in layer.points}
            alone = [f"micro-batches of {size}" for size in rows if len(rows) == 1]
            alone += [f"token slices of {length} tokens" for length in lengths if len(lengths) == 1]
            if alone:
                found[" and ".join(alone)].append(layer.tensor_parallel_size)
    for alone_in_words, sizes in found.items():
        yield f"{alone_in_words} (tensor-parallel size {' and '.join(map(str, sorted(set(sizes))))})"


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

    @property
    def includes_collectives(self) -> bool:
        """Each rank was measured alone."""
        return False

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
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
