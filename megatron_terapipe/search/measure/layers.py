"""Times the layers of a model as the engine runs them: sequences in token slices, forward and backward.

    forward     F0 F1 F2 F3
    backward                B3 B2 B1 B0       in one piece, then once more in two: BI, and BW deferred

Every rank of this machine measures at the same time, each its part of the layer, because cores and memory are shared.
Then messages between the ranks of a process group, by the class of links that they take; and the engine outside of
layers, from steps of two real engines that differ in their number of layers:

    a step = its ops + op_s x their number + optimizer_s_per_parameter x parameters + iteration_s
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, pairwise, repeat
from math import inf
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
from deepspeed_ext.runtime.module import TokenSlicePipelineModule, takes_past
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig, PrecisionConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.config.training import OptimizerConfig
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss
from megatron_terapipe.model.tensor_parallel import Pending, TensorParallelRanks
from megatron_terapipe.search.measure.sizes import MESSAGE_BYTES, LinkClass, MeasuredRun, Nodes, link_classes
from megatron_terapipe.search.price.layer_times import Numbers
from megatron_terapipe.search.price.profile import LayerShape, OpPoint, ProfiledEngine, ProfiledLink
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from megatron_terapipe.training.micro_batches import split_batch
from megatron_terapipe.training.optimizer import build_optimizer

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


@dataclass(frozen=True)
class TimedLayers:
    """Layers of one kind, to be run one after the other."""

    shape: LayerShape
    modules: tuple[nn.Module, ...]
    functions: tuple[Callable[..., Tensor], ...]
    """The forward of each; may be another function of a module, as of a tied embedding."""
    count: int = 1
    """Divisor of the times."""
    reads_tokens: bool = False
    ends_in_loss: bool = False


def build_layers(
    model: ModelConfig, ranks: TensorParallelRanks, dtype: torch.dtype, device: torch.device, *, recompute: str
) -> list[TimedLayers]:
    """Return an entry for each kind of layer: its different blocks and, without recomputation, its two ends."""
    specs = gpt_layers(model, ranks, recompute_cheap=recompute == "selective")
    workload = gpt_workload(model)

    def built(spec: LayerSpec) -> nn.Module:
        return spec.build().to(device=device, dtype=dtype)

    found = []
    blocks = workload.layers[workload.first_dealt : workload.end_dealt]
    for shape in dict.fromkeys(LayerShape.of(block) for block in blocks):
        index = [LayerShape.of(block) for block in blocks].index(shape)
        modules = tuple(built(specs[LAYERS_BEFORE_BLOCKS + index]) for _ in range(BLOCKS_TOGETHER))
        found.append(TimedLayers(shape, modules, modules, count=BLOCKS_TOGETHER))
    if recompute != "none":
        return found
    words, positions, norm, head = (built(specs[index]) for index in (0, 1, -2, -1))
    output = partial(specs[-1].forward_fn, head) if isinstance(specs[-1], TiedLayerSpec) else head
    embedding_shape, norm_shape, head_shape = (LayerShape.of(workload.layers[index]) for index in (0, -2, -1))
    found.append(TimedLayers(embedding_shape, (words, positions), (words, positions), reads_tokens=True))
    found.append(TimedLayers(norm_shape, (norm,), (norm,)))
    found.append(TimedLayers(head_shape, (head,), (output,), ends_in_loss=True))
    return found


class LayerTimer:
    """Runs layers as the engine does, and times each op."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self._weight_gradients = WeightGradients()

    def points(
        self, built: Sequence[TimedLayers], runs: Sequence[MeasuredRun], is_over: Callable[[MeasuredRun], bool]
    ) -> list[tuple[TimedLayers, list[OpPoint]]]:
        """Medians over repeats, for each token slice of each layer; all ranks must call it at the same time.

        All runs are visited in turn, again and again, so that a temporary disturbance of the machine affects all runs.
        `is_over(visited run)`: whether time is over, the same on all ranks; at least one run is visited.
        """
        sums: dict[LayerShape, AccumulatedGradients | None] = {}
        for layers in built:
            for module in layers.modules:
                self._weight_gradients.attach(module)
            sums[layers.shape] = None
            if self._dtype is torch.bfloat16:
                # The engine adds bf16 gradients to fp32 sums.
                weights = dict.fromkeys(each for module in layers.modules for each in module.parameters())
                zeros = ((weight, torch.zeros_like(weight, dtype=torch.float32)) for weight in weights)
                sums[layers.shape] = AccumulatedGradients(zeros)
        found: dict[tuple[LayerShape, MeasuredRun], list[Numbers]] = {}
        for run in islice(cycle(runs), MOST_VISITS * len(runs)):
            for layers in built:
                repeats = found.setdefault((layers.shape, run), [])
                if not repeats:
                    # Gradients exist from the first on, as within a step: products add to them.
                    self._repeat(layers, run, sums[layers.shape])
                begun, visited = time.perf_counter(), len(repeats)
                while len(repeats) == visited or self._together(time.perf_counter() - begun) < VISIT_S:
                    dist.barrier()
                    repeats.append(self._repeat(layers, run, sums[layers.shape]))
            if is_over(run):
                break
        visited_runs = [run for run in runs if (built[0].shape, run) in found]
        return [
            (layers, [point for run in visited_runs for point in self._points(layers, run, found[layers.shape, run])])
            for layers in built
        ]

    def _points(self, layers: TimedLayers, run: MeasuredRun, repeats: Sequence[Numbers]) -> Iterator[OpPoint]:
        # One message for all token slices: on a slow link a message takes longer than a measured op.
        medians = self._together(np.median(repeats, axis=0))
        for (start, end), times in zip(self._cut(run).bounds(), medians, strict=True):
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

    def _repeat(self, layers: TimedLayers, run: MeasuredRun, sums: AccumulatedGradients | None) -> Numbers:
        """Seconds [S, 4] of the ops of each token slice: forward, backward, input gradient, weight gradient."""
        whole, parts = (np.array(self._once(layers, run, sums, defers=defers)) for defers in (False, True))
        return np.column_stack([(whole[:, 0] + parts[:, 0]) / 2, whole[:, 1], parts[:, 1:]])

    def _once(
        self, layers: TimedLayers, run: MeasuredRun, sums: AccumulatedGradients | None, *, defers: bool
    ) -> list[tuple[float, float, float]]:
        """Forward, backward and weight gradient of each token slice of one micro-batch."""
        cut = self._cut(run)
        state = SequenceState(cut, sequences=range(run.micro_batch_size))
        inputs = [self._input(layers, run.micro_batch_size, length) for length in cut.lengths]
        forwards, roots = [], []
        for index, given in enumerate(inputs):
            targets = torch.zeros(run.micro_batch_size, cut.lengths[index], dtype=torch.long)
            with Stopwatch() as watch:
                output = given
                for number, (module, function) in enumerate(zip(layers.modules, layers.functions, strict=True)):
                    keywords = {"past": state.past(number, index)} if takes_past(module) else {}
                    output = function(output, **keywords)
                if layers.ends_in_loss:
                    output = gpt_loss(output, (targets.to(self._device), torch.ones_like(targets).to(self._device)))
            forwards.append(watch.seconds)
            roots.append(output)
        found: list[tuple[float, float, float]] = []
        for index in reversed(range(len(cut))):
            root = roots.pop()
            gradient = torch.ones_like(root)
            weights_s = 0.0
            with Stopwatch() as watch:
                with self._weight_gradients.deferring() if defers else nullcontext() as deferred:
                    torch.autograd.backward(root, gradient)
                if sums is not None:
                    sums.collect()
            del root
            if deferred is not None:
                with Stopwatch() as other:
                    compute(deferred)
                weights_s = other.seconds
            found.append((forwards[index], watch.seconds, weights_s))
        return found[::-1]

    def _input(self, layers: TimedLayers, rows: int, length: int) -> Tensor:
        if layers.reads_tokens:
            return torch.randint(self._model.vocab_size or 2, (rows, length), device=self._device)
        shape = rows, length, self._model.hidden_size
        return torch.randn(shape, dtype=self._dtype, device=self._device, requires_grad=True)


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
