"""Times the layers of a model as the engine runs them: sequences in token slices, forward and backward.

    forward     F0 F1 F2 F3
    backward                B3 B2 B1 B0       in one piece, then once more in two: BI, and BW deferred

Every rank of this machine measures at the same time, each its part of the layer, because cores and memory are shared.
Then messages between the ranks of a process group, by the class of links that they take; and the engine outside of
layers, from steps of two real engines that differ in their number of layers:

    a step = its ops + op_s x their number + optimizer_s_per_parameter x parameters + iteration_s
"""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice, pairwise, repeat
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.channels import TensorSpec
from deepspeed_ext.runtime.gradients.weight_gradients import AccumulatedGradients, WeightGradients, compute
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.micro_batch import map_tensors, tensors_in
from deepspeed_ext.runtime.module import TokenSlicePipelineModule, takes_past
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import ExpertParallelRanks, Pending, SequenceParallelRanks
from megatron_terapipe.config import Config, ModelConfig, PrecisionConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.config.training import OptimizerConfig
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.gpt import ModelRanks, gpt_layers, gpt_loss
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.search.measure.sizes import (
    MESSAGE_BYTES,
    LinkClass,
    MeasuredRun,
    MeasuredSizes,
    Nodes,
    link_classes,
)
from megatron_terapipe.search.price.layer_times import Numbers
from megatron_terapipe.search.price.profile import (
    FORMAT,
    LayerShape,
    OpPoint,
    Profile,
    ProfiledEngine,
    ProfiledLayer,
    ProfiledLink,
)
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from megatron_terapipe.training.micro_batches import split_batch
from megatron_terapipe.training.optimizer import build_optimizer
from megatron_terapipe.training.own_layers import blocks_of
from megatron_terapipe.training.trained_model import TrainedModel

BLOCKS_TOGETHER = 3
"""Blocks that are timed one after the other, so that the weights of each are not still in the cache."""

VISIT_S = 0.1
"""Seconds for which a run is repeated before the next one's turn, once at least."""

MOST_VISITS = 9
"""Turns of each run: more would not make the median steadier."""


class IsolatedRanks(TensorParallelRanks):
    """Ranks that compute their parts of each layer without collectives."""

    __slots__ = ()

    def start_sum(self, part: Tensor) -> Pending:
        """Return a function that returns the part [...] itself, without a sum."""
        return lambda: part


class BuiltLayer(NamedTuple):
    """A layer on the device."""

    function: Callable[..., Any]
    """Its forward; may be another function of the module, as of a tied embedding."""
    module: nn.Module | None = None
    """None for a function without weights."""

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype, device: torch.device) -> "BuiltLayer":
        """Build a layer; a tied one has a module of its own."""
        function = layer.forward_fn if isinstance(layer, TiedLayerSpec) else None
        with device:
            layer = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(layer, nn.Module):
            layer = layer.to(device=device, dtype=dtype)
        return cls(partial(function, layer) if function else layer, layer if isinstance(layer, nn.Module) else None)


def run_layers(layers: Sequence[BuiltLayer], hidden: Any, state: SequenceState, token_slice: int) -> Any:
    """Return the output of layers, one after the other, for a token slice."""
    for number, layer in enumerate(layers):
        keywords = {"past": state.past(number, token_slice)} if takes_past(layer.function) else {}
        hidden = layer.function(hidden, **keywords)
    return hidden


@dataclass(frozen=True)
class TimedLayers:
    """Layers of one kind, to be run one after the other; without layers and loss they take no time."""

    shape: LayerShape
    layers: tuple[BuiltLayer, ...] = ()
    before: tuple[BuiltLayer, ...] = ()
    """Layers that make the inputs from token ids, untimed."""
    loss: Callable[[Any, tuple[Tensor, Tensor]], Tensor] | None = None
    """Loss of the last one's outputs, timed with them."""
    count: int = 1
    """Divisor of the times."""
    weight: int = 1
    """Layers of the model that count as these: times of a shape are the mean over all of its layers."""


def build_layers(
    trained: TrainedModel, config: Config, ranks: TensorParallelRanks, dtype: torch.dtype, device: torch.device
) -> list[TimedLayers]:
    """Return an entry for each kind of block, a shape and a class, and, without recomputation, for the ends.

    Layers of a program's own have the times of a GPT's of the same flags: those before its blocks are the embedding,
    the last one is the head, those between are the final norm.
    """
    model = config.model
    with device:
        layers = list(trained.layers(config, ModelRanks(ranks, ExpertParallelRanks(), SequenceParallelRanks())))
    blocks = range(LAYERS_BEFORE_BLOCKS, LAYERS_BEFORE_BLOCKS + model.num_layers)
    if not trained.is_gpt and len(blocks := blocks_of(layers, model.num_layers)) != model.num_layers:
        raise ConfigError(
            f"--num-layers {model.num_layers} is not the number of blocks of {trained.program}, the layers from the "
            "first to the last whose class occurs more than once, so their times cannot be used: correct it"
        )

    def built(*numbers: int) -> tuple[BuiltLayer, ...]:
        return tuple(BuiltLayer.of(layers[number], dtype, device) for number in numbers)

    embedding, *shapes, norm, head = (LayerShape.of(each) for each in gpt_workload(model).layers)
    classes = [
        each.typename if isinstance(each, LayerSpec) else type(each) for each in layers[blocks.start : blocks.stop]
    ]
    kinds = list(zip(shapes, classes, strict=True))
    before, found = built(*range(blocks.start)), []
    for kind in dict.fromkeys(kinds):
        together = built(*[blocks[kinds.index(kind)]] * BLOCKS_TOGETHER)
        found.append(TimedLayers(kind[0], together, before, count=BLOCKS_TOGETHER, weight=kinds.count(kind)))
    if config.training.recompute_granularity == "selective":
        return found
    after = range(blocks.stop, len(layers))
    norms, output = built(*after[:-1]), built(*after[-1:])
    found += TimedLayers(embedding, before), TimedLayers(norm, norms, before)
    return [*found, TimedLayers(head, output, (*before, *norms), trained.loss or gpt_loss)]


class LayerTimer:
    """Runs layers as the engine does, and times each op."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._weight_gradients = WeightGradients()

    def points(
        self,
        built: Sequence[TimedLayers],
        runs: Sequence[MeasuredRun],
        is_over: Callable[[MeasuredRun], bool],
    ) -> dict[LayerShape, list[OpPoint]]:
        """Medians over repeats, for each token slice of each shape; all ranks must call it at the same time.

        All runs are visited in turn, again and again, so that a temporary disturbance of the machine affects all runs.
        `is_over(visited run)`: whether time is over, the same on all ranks; two runs are visited anyway.
        """
        sums: list[AccumulatedGradients | None] = []
        for layers in built:
            modules = dict.fromkeys(layer.module for layer in layers.layers if layer.module is not None)
            for module in modules:
                self._weight_gradients.attach(module)
            sums.append(None)
            if self._dtype is torch.bfloat16:
                # The engine adds bf16 gradients to fp32 sums.
                weights = dict.fromkeys(each for module in modules for each in module.parameters())
                zeros = ((weight, torch.zeros_like(weight, dtype=torch.float32)) for weight in weights)
                sums[-1] = AccumulatedGradients(zeros)
        found: dict[MeasuredRun, list[list[Numbers]]] = {}
        for number, run in enumerate(islice(cycle(runs), MOST_VISITS * len(runs)), start=1):
            of_run = found.setdefault(run, [[] for _ in built])
            for layers, total, repeats in zip(built, sums, of_run, strict=True):
                if not layers.layers and layers.loss is None:
                    continue
                inputs = self._inputs(layers, run)
                if not repeats:
                    # Gradients exist from the first on, as within a step: products add to them.
                    self._repeat(layers, run, inputs, total)
                begun, visited = time.perf_counter(), len(repeats)
                while len(repeats) == visited or self._together(time.perf_counter() - begun) < VISIT_S:
                    dist.barrier()
                    repeats.append(self._repeat(layers, run, inputs, total))
            if is_over(run) and number >= min(2, len(runs)):
                break
        by_shape: dict[LayerShape, list[tuple[int, list[OpPoint]]]] = defaultdict(list)
        for number, layers in enumerate(built):
            points = [point for run, of_run in found.items() for point in self._points(layers, run, of_run[number])]
            by_shape[layers.shape].append((layers.weight, points))
        return {shape: list(_means(groups)) for shape, groups in by_shape.items()}

    def _points(self, layers: TimedLayers, run: MeasuredRun, repeats: Sequence[Numbers]) -> Iterator[OpPoint]:
        bounds = list(self._cut(run).bounds())
        # One message for all token slices: on a slow link a message takes longer than a measured op.
        medians = self._together(np.median(repeats, axis=0)) if repeats else [[0.0] * 4] * len(bounds)
        for (start, end), times in zip(bounds, medians, strict=True):
            forward, backward, of_input, of_weight = (each / layers.count for each in times)
            # Most schedules run the whole backward; the two parts determine its division.
            share = of_input / (of_input + of_weight) if of_input + of_weight else 0.0
            yield OpPoint(run.micro_batch_size, start, end, forward, backward * share, backward * (1 - share))

    def _cut(self, run: MeasuredRun) -> TokenSlices:
        return TokenSlices.uniform(self._model.seq_length, run.num_token_slices)

    def _together(self, seconds: object) -> Any:
        """Means over the ranks as lists, of the shape [...] of the given numbers."""
        total = torch.tensor(seconds, dtype=torch.float64 if self._device.type == "cpu" else torch.float32)
        total = total.to(self._device)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).tolist()

    def _repeat(
        self, layers: TimedLayers, run: MeasuredRun, inputs: Sequence[Any], sums: AccumulatedGradients | None
    ) -> Numbers:
        """Seconds [S, 4] of the ops of each token slice: forward, backward, input gradient, weight gradient."""
        whole, parts = (np.array(self._once(layers, run, inputs, sums, defers=defers)) for defers in (False, True))
        return np.column_stack([(whole[:, 0] + parts[:, 0]) / 2, whole[:, 1], parts[:, 1:]])

    def _once(
        self,
        layers: TimedLayers,
        run: MeasuredRun,
        inputs: Sequence[Any],
        sums: AccumulatedGradients | None,
        *,
        defers: bool,
    ) -> list[tuple[float, float, float]]:
        """Forward, backward and weight gradient of each token slice of one micro-batch."""
        cut = self._cut(run)
        state = SequenceState(cut, sequences=range(run.micro_batch_size))
        forwards, roots = [], []
        for index, given in enumerate(map_tensors(_leaf, inputs)):
            of_slice = run.micro_batch_size, cut.lengths[index]
            labels = torch.zeros(of_slice, dtype=torch.long, device=self._device)
            loss_mask = torch.ones(of_slice, device=self._device)
            with Stopwatch() as watch:
                output = run_layers(layers.layers, given, state, index)
                if layers.loss is not None:
                    output = layers.loss(output, (labels, loss_mask))
            forwards.append(watch.seconds)
            roots.append([tensor for tensor in tensors_in(output) if tensor.requires_grad])
            del output
        found: list[tuple[float, float, float]] = []
        for index in reversed(range(len(cut))):
            pairs: list[Any] = [(root, torch.ones_like(root)) for root in roots.pop()]
            pairs += state.carried.roots(index)
            weights_s = 0.0
            with Stopwatch() as watch:
                with self._weight_gradients.deferring() if defers else nullcontext() as deferred:
                    if pairs:
                        torch.autograd.backward(*zip(*pairs, strict=True))
                if sums is not None:
                    sums.collect()
            del pairs
            if deferred is not None:
                with Stopwatch() as other:
                    compute(deferred)
                weights_s = other.seconds
            found.append((forwards[index], watch.seconds, weights_s))
        return found[::-1]

    def _inputs(self, layers: TimedLayers, run: MeasuredRun) -> list[Any]:
        """Inputs of the layers for each token slice: token ids [B, N], or the outputs of the layers before."""
        cut = self._cut(run)
        state = SequenceState(cut, sequences=range(run.micro_batch_size), forward_only=True)
        vocabulary = self._model.vocab_size or 2
        found = []
        with torch.no_grad():
            for index, length in enumerate(cut.lengths):
                tokens = torch.randint(vocabulary, (run.micro_batch_size, length), device=self._device)
                found.append(run_layers(layers.before, tokens, state, index))
        return found


def _leaf(entry: Any) -> Any:
    return entry.detach().requires_grad_(entry.is_floating_point()) if torch.is_tensor(entry) else entry


def _means(groups: Sequence[tuple[int, Sequence[OpPoint]]]) -> Iterator[OpPoint]:
    """Yield the means of points at the same places, of groups of layers with a weight each."""
    weights = [weight for weight, _ in groups]
    for same in zip(*(points for _, points in groups), strict=True):
        seconds = np.average([point[3:] for point in same], axis=0, weights=weights).tolist()
        yield OpPoint(*same[0][:3], *seconds)


class Stopwatch:
    """Seconds until the device has run the ops inside."""

    def __enter__(self) -> "Stopwatch":
        self._accelerator = get_accelerator()
        self._accelerator.synchronize()
        self._begun = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._accelerator.synchronize()
        self.seconds = time.perf_counter() - self._begun


def merged(points: Sequence[OpPoint], *, by_place: bool) -> tuple[OpPoint, ...]:
    """Points of a layer; of one that does not attend, one for each size, whatever place it was measured at."""
    if by_place:
        return tuple(points)
    sizes: dict[tuple[int, int], list[OpPoint]] = {}
    for point in points:
        sizes.setdefault((point.micro_batch_size, point.end - point.start), []).append(point)
    return tuple(
        OpPoint(size, 0, length, *(median(times) for times in zip(*(point[3:] for point in of_size), strict=True)))
        for (size, length), of_size in sizes.items()
    )


def measured_layers(
    sizes: MeasuredSizes,
    trained: TrainedModel,
    config: Config,
    device: torch.device,
    budget_s: float,
    doing: Callable[[float, MeasuredRun], None] = lambda share, run: None,
) -> tuple[ProfiledLayer, ...]:
    """Measure layers on all ranks of the process group together.

    Args:
        budget_s: seconds of the first rank, from the time when the first layers are built, after which no further size
            is begun.
        doing: callback(share of the time, visited run).
    """
    left, rank, found = max(budget_s, 0.0), dist.get_rank(), []
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[sizes.precision]
    own_group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    for size, recompute, share in sizes.layouts():
        begun = time.perf_counter()
        ranks: TensorParallelRanks = IsolatedRanks(rank % size, size, own_group) if size > 1 else IsolatedRanks()
        training = replace(config.training, recompute_granularity=recompute)  # type: ignore[arg-type]
        built = build_layers(trained, replace(config, training=training), ranks, dtype, device)
        ends = time.perf_counter() + share * left

        def is_over(run: MeasuredRun, ends: float = ends, end: float = begun + left) -> bool:
            doing(1 - (end - time.perf_counter()) / max(budget_s, 1.0), run)
            # All ranks go by the clock of the first.
            over = torch.tensor([float(time.perf_counter() > ends)], device=device)
            dist.broadcast(over, 0)
            return bool(over.item())

        timer = LayerTimer(sizes.model, dtype, device)
        for shape, points in timer.points(built, list(sizes.runs(size, recompute)), is_over).items():
            found.append(
                ProfiledLayer(
                    shape=shape,
                    tensor_parallel_size=size,
                    recompute=recompute,  # type: ignore[arg-type]
                    points=merged(points, by_place=shape.kind == "block"),
                )
            )
        left = max(left - (time.perf_counter() - begun), 0.0)
    return tuple(found)


def profile_here(layers: tuple[ProfiledLayer, ...], sizes: MeasuredSizes, **more: Any) -> Profile:
    """Return the profile of this machine; `more`: other fields of it."""
    name = get_accelerator().device_name()
    return Profile(
        format=FORMAT,
        device=_processor() if name == "cpu" else str(torch.cuda.get_device_name()),
        accelerator=name,
        precision=sizes.precision,  # type: ignore[arg-type]
        software={package: version(package) for package in ("torch", "deepspeed", "numpy")},
        layers=layers,
        own_model=None if sizes.program is None else Path(sizes.program[0]).name,
        **more,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


REPEATS = 15
"""Timings of messages of one size, fewer where they would take longer than the size's part of the time."""

LEAST_REPEATS = 3

UNCOUNTED = 2
"""First timings of each size, which warm up and estimate the time of one."""

LEAST_SIZES = 5
"""Sizes that are timed however slow a link is, up to 1 MiB: networks that limit a rate let short messages pass."""

AT_ONCE = 4
"""Short messages that one timing sends one after the other: ranks leave a barrier at different times."""

SHORT_BYTES = 2**18


def nodes_of_ranks() -> Nodes:
    """Return the ranks of each node, as their launcher numbers the nodes; every rank must call it at the same time."""
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, int(os.environ.get("CROSS_RANK", "0")))
    return [[rank for rank, node in enumerate(found) if node == each] for each in sorted(set(found))]


def measure_links(
    device: torch.device, nodes: Nodes, doing: Callable[[str], None] = lambda _: None, budget_s: float = inf
) -> list[ProfiledLink]:
    """Measure every class of links between ranks; every rank must call it at the same time.

    `budget_s`: for all classes, the same on every rank; on a slow link the longest messages are omitted.
    """
    if dist.get_world_size() == 1:
        return []
    classes = list(link_classes(nodes))
    return [_measured(each, device, doing, budget_s / len(classes)) for each in classes]


def _measured(links: LinkClass, device: torch.device, doing: Callable[[str], None], budget_s: float) -> ProfiledLink:
    doing(links.words)
    rank = dist.get_rank()
    # Every rank must name every group, in the same order.
    made = [(ranks, dist.new_group(list(ranks))) for ranks in links.groups]
    mine = next(((ranks, group) for ranks, group in made if rank in ranks), None)

    def send(message: torch.Tensor) -> None:
        if mine is None:
            return
        ranks, group = mine
        if links.what == "all_reduce":
            dist.all_reduce(message, group=group)
        elif rank == ranks[0]:
            dist.send(message, ranks[1], group=group)
            dist.recv(message, ranks[1], group=group)
        else:
            dist.recv(message, ranks[0], group=group)
            dist.send(message, ranks[0], group=group)

    ways = 2 if links.what == "transfer" else 1
    points = tuple((size, seconds / ways) for size, seconds in _points(send, device, budget_s))
    for _, group in made:
        if mine is not None and group is mine[1]:
            dist.destroy_process_group(group)
    return ProfiledLink(
        where=links.where,
        what=links.what,
        num_ranks=len(links.groups[0]),
        points=points,
        ranks_per_node=links.ranks_per_node,
        flows=links.flows,
    )


def _points(send: Callable[[torch.Tensor], None], device: torch.device, budget_s: float) -> Iterator[tuple[int, float]]:
    """Yield (bytes, seconds) of messages; the slowest group's, median over repeats."""
    spent_s = byte_s = 0.0
    for number, size in enumerate(MESSAGE_BYTES):
        # All ranks go by times that they have agreed on, not by their clocks.
        if number >= LEAST_SIZES and spent_s + (UNCOUNTED + LEAST_REPEATS) * size * byte_s > budget_s:
            return
        message = torch.zeros(size // 4, dtype=torch.float32, device=device)
        count = AT_ONCE if size <= SHORT_BYTES else 1
        _timed(send, message, count)
        (once,) = _slowest([_timed(send, message, count)], device)
        wanted = budget_s / len(MESSAGE_BYTES) / max(once * count, 1e-9)
        repeats = int(max(min(REPEATS, wanted), min(LEAST_REPEATS, REPEATS)))
        yield size, median(_slowest([_timed(send, message, count) for _ in range(repeats)], device))
        spent_s += (UNCOUNTED + repeats) * once * count
        byte_s = once / size


def _timed(send: Callable[[torch.Tensor], None], message: torch.Tensor, count: int) -> float:
    """Seconds of one of several messages of this rank."""
    dist.barrier()
    with Stopwatch() as watch:
        for _ in range(count):
            send(message)
    return watch.seconds / count


def _slowest(times: list[float], device: torch.device) -> list[float]:
    found = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]


STEPS = 7
"""Measured steps of each engine, fewer where the time is over."""

LEAST_STEPS = 2

WARM_UP_STEPS = 2

NUM_MICRO_BATCHES = 2


class _Step(NamedTuple):
    """An engine's steps: medians, and the time outside of ops of the one that was disturbed least."""

    parameters: int
    outside_s: float
    least_outside_s: float
    op_s: float


def measure_engine(model: ModelConfig, precision: str, num_token_slices: int, budget_s: float = inf) -> ProfiledEngine:
    """Measure engines with one and with three layers, on one rank; messages between ranks are priced by links."""
    small, large = (_measured_step(model, number, precision, num_token_slices, budget_s / 2) for number in (1, 3))
    # A difference of two medians would be mostly noise.
    each = (large.least_outside_s - small.least_outside_s) / (large.parameters - small.parameters)
    each = max(each, 0.0)
    return ProfiledEngine(
        op_s=median((small.op_s, large.op_s)),
        optimizer_s_per_parameter=each,
        iteration_s=max(min(small.outside_s - each * small.parameters, large.outside_s - each * large.parameters), 0.0),
    )


def _measured_step(
    model: ModelConfig, num_blocks: int, precision: str, num_token_slices: int, budget_s: float
) -> _Step:
    ends = time.perf_counter() + budget_s
    cut = TokenSlices.uniform(model.seq_length, num_token_slices)
    strategy = Strategy(num_token_slices=num_token_slices, global_batch_size=NUM_MICRO_BATCHES)
    flags = PrecisionConfig(bf16=precision == "bf16", fp16=precision == "fp16")
    config = strategy.config(model, precision=flags)
    layout = ParallelLayout(num_token_slices=num_token_slices)
    layers = gpt_layers(model)
    first, end = LAYERS_BEFORE_BLOCKS, LAYERS_BEFORE_BLOCKS + model.num_layers
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        module = TokenSlicePipelineModule(
            [*layers[:first], *islice(cycle(layers[first:end]), num_blocks), *layers[end:]],
            layout=layout,
            token_slices=cut,
            loss_fn=gpt_loss,
            partition="uniform",
            split_batch=split_batch,
            activation_spec=lambda rows, length, dtype: (TensorSpec((rows, length, model.hidden_size), dtype, True),),
        )
        optimizer = build_optimizer(OptimizerConfig(lr=1e-4), module.named_parameters())
        engine, *_ = initialize(module, deepspeed_config(config, layout), optimizer=optimizer)
    outside: list[float] = []
    between: list[float] = []
    batches = map(MicroBatch.from_samples, repeat(torch.randint(model.vocab_size or 2, (1, model.seq_length + 1))))
    for step in range(WARM_UP_STEPS + STEPS):
        if len(outside) >= LEAST_STEPS and time.perf_counter() > ends:
            break
        get_accelerator().synchronize()
        begun = time.perf_counter()
        with engine.timeline() as timelines:
            entered = time.perf_counter() - begun
            engine.train_batch(batches)
            get_accelerator().synchronize()
            seconds = time.perf_counter() - begun - entered
        if step < WARM_UP_STEPS:
            continue
        (spans,) = timelines[0].spans
        busy = sum(span.end - span.start for span in spans)
        gaps = [later.start - earlier.end for earlier, later in pairwise(spans)]
        between.append(median(gaps))
        outside.append(seconds - busy - sum(gaps))
    parameters = sum(weight.numel() for weight in module.parameters())
    return _Step(parameters, median(outside), min(outside), max(median(between), 0.0))
