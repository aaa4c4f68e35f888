"""Memory of a strategy: peak bytes of each pipeline rank, the copies on hosts, and overheads.

    states (bytes a parameter) + peak of activations -> Counted --overheads--> RankMemory

Sources: `zero/stage_1_and_2.py`, `fp16/fused_optimizer.py` and `bf16_optimizer.py` of DeepSpeed 0.19.8's `runtime`;
Adam of Kingma and Ba, arXiv 1412.6980; ZeRO, arXiv 1910.02054 section 3.1 (16 bytes a parameter).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.simulate.arrays import OpColumns
from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.software import ELEMENT_BYTES, OPERAND_BYTES, Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.activations import (
    Held,
    LayerMemory,
    StageBytes,
    TokenMemory,
    limits_of,
    orders_of_ranks,
    peak_held,
    steady_micro_batches,
)
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, constant
from megatron_terapipe.search.price.layer_times import ScalarOrArray, key_heads
from megatron_terapipe.search.price.stages import LayerCounter, LayerCounts, PlacedStrategy, stage_ops
from megatron_terapipe.search.price.workload import Layer, Workload
from megatron_terapipe.strategy import USUAL_KEYS, KeptKeys, Strategy

Floats = NDArray[np.float64]

SUMS_BYTES = 4 + 4 + 8
"""Of a token between two stages of the vocabulary: two sums in fp32, and the label."""

SHARE_OF_HOST = 0.8
"""Of the memory of a host, for copies; the rest is for data, checkpoints on their way, and the system."""


def stage_input_elements(workload: Workload, counts: LayerCounts) -> Floats:
    """Return the numbers of one token in the input of each stage, before ranks share it: [stages]."""
    before = [workload.layers[index].output_elements for index in counts.last_layers]
    return np.array([0.0, *before]) / workload.seq_length


def host_copy_settings(
    placed: PlacedStrategy, counter: LayerCounter, cluster: Cluster, element_bytes: int, efficiency: HardwareEfficiency
) -> HostCopySettings:
    """Return the bytes that may wait on hosts and the bandwidth to them, for timelines in seconds."""
    strategy, counts, workload, kinds = placed.strategy, placed.counts, counter.workload, counter.kinds
    seq_length = workload.seq_length
    of_kinds = np.array([_key_value_elements(layer, placed) * layer.tokens / seq_length for layer in kinds])
    sequences = strategy.micro_batch_size / strategy.sequence_parallel_size
    inputs = element_bytes * stage_input_elements(workload, counts) * strategy.micro_batch_size / strategy.granularity
    if strategy.vocabulary_stages:
        inputs[len(inputs) - strategy.pipeline_parallel_size + 1 :] += sequences * SUMS_BYTES
    nodes = cluster.nodes
    bandwidth = efficiency.host_efficiency * min(node.host.bandwidth for node in nodes)
    return HostCopySettings(
        lengths=strategy.cut(seq_length).lengths,
        input_bytes=tuple(inputs.tolist()),
        key_value_bytes=tuple((element_bytes * sequences * (counts.per_stage @ of_kinds)).tolist()),
        to_host=bandwidth,
        from_host=bandwidth,
        host_bytes=host_bytes(cluster),
        windows=tuple(_widest_window(kinds, row) for row in counts.per_stage),
    )


def host_bytes(cluster: Cluster) -> float:
    """Return the most bytes of a host that token slices of one device may wait in, on the smallest host."""
    return SHARE_OF_HOST * min(node.host.memory_bytes / node.num_devices for node in cluster.nodes)


def _key_value_elements(layer: Layer, placed: PlacedStrategy) -> float:
    """Numbers of the keys and values of a token on a rank; its part counts as all tokens of a part of sequences."""
    if layer.attention is None:
        return 0.0
    layout = placed.strategy.layout
    heads = key_heads(layer.attention, layout.tensor_parallel_size * layout.sequence_parallel_size)
    if layer.attention.latent is not None and placed.strategy.kept_keys.latents:
        return float(layer.attention.latent.kept_size)
    width = layer.attention.head_size + layer.attention.value_size
    return float(heads * width / layout.tensor_parallel_size)


def _widest_window(kinds: Sequence[Layer], counts: Floats) -> int | None:
    """The widest sliding window of a stage with [K] layers; None where one attends to all tokens before it."""
    here = [layer.attention for layer, count in zip(kinds, counts, strict=True) if count]
    windows = [attention.sliding_window for attention in here if attention is not None]
    return None if None in windows else max((window for window in windows if window is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOverheads:
    """Constants of the memory model. None of them belongs to a strategy, a model or a row of a table."""

    framework_bytes: float = constant(3.0e9, 0.7)
    """On each device: context, workspaces of libraries, the communicator of all ranks, and kernels, all of them loaded
    at the start (`CUDA_MODULE_LOADING=EAGER`; more than 1 GB, https://github.com/pytorch/pytorch/issues/107667). An
    estimate."""
    communicator_bytes: float = constant(0.5e9, 0.7)
    """Buffers of the communicators of one axis that a rank is in, whatever it sends. An estimate; on a GPU of
    vLLM took 1.0 GB (https://github.com/vllm-project/vllm/pull/46234). Messages have little: two channels of 9.2 MiB
    for each communicator that receives (`MESSAGE_CTAS`, sizes in NCCL's `device.h`)."""
    state_factor: float = constant(1.02, 0.03)
    """Memory taken for a byte of weights, gradients and optimizer state."""
    activation_factor: float = constant(1.06, 0.08)
    """Memory taken for a byte that is allocated and freed in an iteration, with fragmentation."""
    working_factor: float = constant(1.0, 0.5)
    """Bytes that an op holds while it runs, in those that its formula counts."""
    usable_share: float = 1.0
    """Part of a device's memory that predictions may fill; a strategy that needs more does not fit."""


ON_CPU = MemoryOverheads(
    framework_bytes=0.5e9, communicator_bytes=20e6, state_factor=1.0, activation_factor=1.03, working_factor=1.0
)
"""Overheads of ranks on CPUs: a process with PyTorch and DeepSpeed loaded, gloo, and malloc."""


def default_overheads(cluster: Cluster, software: Software) -> MemoryOverheads:
    """Constants before anything was measured."""
    if not any(node.device.is_gpu for node in cluster.nodes):
        return ON_CPU
    return MemoryOverheads(activation_factor=software.allocator_factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of one pipeline rank (its largest tensor-, sequence- and data-parallel peer), by kind."""

    weights: float
    """Parameters as products read them."""
    gradients: float
    """Their gradients."""
    optimizer: float
    """Fp32 copies and moments that this rank keeps."""
    activations: float
    """Kept from forward to backward, without keys and values."""
    key_values: float
    """Keys and values of live token slices, and their gradients."""
    logits: float
    """Logits, and the tensors that the loss keeps."""
    buffers: float
    """Of transfers and reductions, and temporary memory of ops."""
    framework: float
    """Context of the device, communicators, fragmentation of the allocator."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


class Counted(NamedTuple):
    """Bytes of one pipeline rank by formulas, without overheads; numbers, or arrays that broadcast."""

    weights: ScalarOrArray
    gradients: ScalarOrArray
    optimizer: ScalarOrArray
    step: ScalarOrArray
    """More while the optimizer steps; by then no activations are held."""
    activations: ScalarOrArray = 0.0
    """Kept from forward to backward, at the peak."""
    key_values: ScalarOrArray = 0.0
    """Of live token slices, with gradients."""
    logits: ScalarOrArray = 0.0
    working: ScalarOrArray = 0.0
    """Temporary memory of the op at the peak."""
    buffers: ScalarOrArray = 0.0
    """Messages between stages, and ZeRO's buckets."""
    communicators: ScalarOrArray = 0.0
    """How many the rank is in."""

    def holding(self, held: Held, messages: ScalarOrArray) -> "Counted":
        """Add the bytes at the moment of the peak, and of messages between stages; arguments broadcast."""
        return self._replace(**held._asdict(), buffers=self.buffers + messages)


def total_bytes(counted: Counted, overheads: MemoryOverheads) -> ScalarOrArray:
    """Peak bytes of a rank; arguments broadcast."""
    states = counted.weights + counted.gradients + counted.optimizer
    fixed = overheads.framework_bytes + counted.communicators * overheads.communicator_bytes
    return (
        overheads.state_factor * states
        + np.maximum(counted.step, _moving(counted, overheads))
        + counted.buffers
        + fixed
    )


def assemble(counted: Counted, overheads: MemoryOverheads) -> RankMemory:
    """Peak memory of a rank, by kind; the kinds add up to `total_bytes`."""
    # The optimizer steps when the last activation is gone: the peak is of the one or of the other.
    steps = float(counted.step) > float(_moving(counted, overheads))
    factor = 0.0 if steps else overheads.activation_factor
    working = float(counted.step) if steps else factor * overheads.working_factor * float(counted.working)
    return RankMemory(
        weights=overheads.state_factor * float(counted.weights),
        gradients=overheads.state_factor * float(counted.gradients),
        optimizer=overheads.state_factor * float(counted.optimizer),
        activations=factor * float(counted.activations),
        key_values=factor * float(counted.key_values),
        logits=factor * float(counted.logits),
        buffers=working + float(counted.buffers),
        framework=overheads.framework_bytes + float(counted.communicators) * overheads.communicator_bytes,
    )


def _moving(counted: Counted, overheads: MemoryOverheads) -> ScalarOrArray:
    """Bytes that are allocated and freed within an iteration."""
    kept = counted.activations + counted.key_values + counted.logits
    return overheads.activation_factor * (kept + overheads.working_factor * counted.working)


IN_TURN = ("working", "attending", "scores", "expanded", "expanded_head")
"""Memory that layers take one after the other: only the layer with most counts."""

TRANSFERS = 3
"""Messages of one token slice that a stage holds in addition to its activations: one received, one sent, and the
gradient in use."""


@dataclass(kw_only=True)
class MemoryModel:
    """Memory of strategies of one workload on one cluster."""

    workload: Workload
    cluster: Cluster
    software: Software = TERAPIPE
    precision: str = "bf16"
    overheads: MemoryOverheads = None  # type: ignore[assignment]
    """Memory that is not of tensors; None = the defaults of the cluster's devices."""
    counter: LayerCounter = field(init=False, repr=False)
    orders: Callable[[str, PipelineShape], list[OpColumns]] = orders_of_ranks
    _tokens: dict[tuple[object, ...], Floats] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.overheads is None:
            self.overheads = default_overheads(self.cluster, self.software)
        self.counter = LayerCounter(self.workload)

    def predict(self, strategy: Strategy, *, copies: HostCopyPlan | None = None) -> tuple[RankMemory, ...]:
        """Peak memory of every pipeline rank; see `count`."""
        return tuple(assemble(rank, self.overheads) for rank in self.count(strategy, copies=copies))

    def count(
        self, strategy: Strategy, *, activation_limit: float | None = None, copies: HostCopyPlan | None = None
    ) -> list[Counted]:
        """Return the bytes of each rank at the moment in which it holds the most, before overheads are applied.

        Args:
            activation_limit: activations that the schedule may hold on each rank, as a multiple of 1F1B's peak on the
                first; None = as the schedule does.
            copies: copies on hosts, for as many micro-batches as `micro_batches_of_peak`; None = none.
        """
        ranks, tensor = strategy.pipeline_parallel_size, strategy.tensor_parallel_size
        partition = self.workload.partition(strategy.stage_partition, ranks * strategy.num_model_chunks)
        counts = self.counter.count(
            partition, ranks, tensor, strategy.expert_parallel_size, vocabulary_stages=strategy.vocabulary_stages
        )
        longest = max(strategy.cut(self.workload.seq_length).lengths) / self.workload.seq_length
        own = strategy.granularity
        states = self.states(
            counts.parameters,
            counts.expert_parameters,
            layout=strategy.layout,
            zero_stage=strategy.zero_stage,
            zero_shard_size=strategy.zero_shard_size,
        )
        messages = self.message_bytes(ranks, strategy.micro_batch_size * longest / own)
        all_ranks = states.holding(self._held(strategy, counts, activation_limit, copies), messages)
        columns = (np.broadcast_to(np.asarray(part, dtype=float), ranks).tolist() for part in all_ranks)
        return [Counted(*rank) for rank in zip(*columns, strict=True)]

    def states(
        self,
        parameters: Floats,
        expert_parameters: Floats | float = 0.0,
        *,
        layout: ParallelLayout,
        zero_stage: int,
        zero_shard_size: int | None = None,
    ) -> Counted:
        """Count bytes [ranks] of weights, gradients, optimizer state, buckets and communicators.

        Args:
            parameters: of a rank, without experts.
            expert_parameters: of experts on a rank.
        """
        copies, state = layout.num_weight_copies, self.software.state(self.precision, zero_stage)
        # Without expert-parallel ranks experts are as other weights of which each tensor-parallel rank has a copy.
        of_experts = copies if layout.expert_parallel_size == 1 else layout.num_expert_copies
        groups = [copies, layout.sequence_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size]
        if layout.expert_parallel_size > 1:
            groups += [layout.expert_parallel_size, layout.num_expert_copies]
        kept = ("weights", "gradients", "optimizer", "step")
        shard_size = zero_shard_size or copies
        bucket = (
            self.software.bucket_elements if zero_stage < 3 else max(each.parameters for each in self.counter.kinds)
        )
        return Counted(
            **{
                name: parameters * state.on_rank(name, shard_size) + expert_parameters * state.on_rank(name, of_experts)
                for name in kept
            },
            # One bucket reduces gradients, the other gathers weights; with stage 3 one layer computes, and the weights
            # of the next are gathered.
            buffers=2 * state.bucket * np.minimum(parameters + expert_parameters, bucket)
            + np.where(np.greater(expert_parameters, 0), self._gradient_of_experts(layout.expert_parallel_size), 0.0),
            communicators=float(sum(size > 1 for size in groups)),
        )

    def _gradient_of_experts(self, expert_parallel_size: int) -> float:
        """Bytes of the largest gradient that a grouped product puts out, before it is added to the sum."""
        if not self.software.products.expert_accumulation_bytes or self.precision == "fp32":
            return 0.0
        largest = [
            each.experts.number / expert_parallel_size * max(product.weights for product in each.experts.products)
            for each in self.counter.kinds
            if each.experts is not None
        ]
        return ELEMENT_BYTES[self.precision] * max(largest, default=0.0)

    def message_bytes(self, pipeline_parallel_size: int, sequences: ScalarOrArray) -> ScalarOrArray:
        """Return the bytes of the messages that a rank holds.

        Args:
            sequences: [...] sequences of one message on one of the ranks that share it, less than 1 for a token slice.
        """
        if pipeline_parallel_size == 1:
            return 0.0 * sequences
        elements = max(layer.output_elements for layer in self.workload.layers)
        return TRANSFERS * ELEMENT_BYTES[self.precision] * elements * sequences

    def token_bytes(
        self, layout: ParallelLayout, recompute: str, sequence_parallel: bool, kept_keys: KeptKeys = USUAL_KEYS
    ) -> Floats:
        """Return the bytes of one token of one sequence in each kind of layer: [fields of `TokenMemory`, K]."""
        sizes = layout.tensor_parallel_size, layout.sequence_parallel_size, layout.expert_parallel_size
        key = *sizes, recompute, sequence_parallel, kept_keys
        if key not in self._tokens:
            config = self.workload.config
            rows = [
                LayerMemory(
                    layer=layer,
                    software=self.software,
                    element_bytes=ELEMENT_BYTES[self.precision],
                    operand_bytes=OPERAND_BYTES[self.precision],
                    tensor_parallel_size=sizes[0],
                    sequence_parallel_size=sizes[1],
                    expert_parallel_size=sizes[2],
                    sequence_parallel=sequence_parallel,
                    kept_keys=kept_keys,
                    activation_is_read_off_output=config is not None and config.activation == "relu",
                ).of_token(recompute)
                for layer in self.counter.kinds
            ]
            # A layer may have more rows of a sequence than the sequence has tokens, or fewer: windows, pooling.
            rows_per_token = np.array([layer.tokens / self.workload.seq_length for layer in self.counter.kinds])
            self._tokens[key] = rows_per_token * np.array([np.broadcast_arrays(*row) for row in rows], dtype=float).T
        return self._tokens[key]

    def micro_batches_of_peak(self, strategy: Strategy) -> int:
        """Return the micro-batches with which every rank reaches its peak; more repeat the steady state."""
        ranks, token_slices = strategy.pipeline_parallel_size, strategy.num_token_slices
        return steady_micro_batches(strategy.schedule, ranks, token_slices, strategy.num_micro_batches)

    def _held(self, strategy: Strategy, counts: LayerCounts, limit: float | None, copies: HostCopyPlan | None) -> Held:
        """[P] bytes that each rank holds at its peak."""
        of_kind = self.token_bytes(strategy.layout, strategy.recompute, strategy.sequence_parallel, strategy.kept_keys)
        is_recomputed = strategy.recompute == "stage"
        of_stage = self.stage_bytes(
            counts,
            of_kind,
            sequences=strategy.micro_batch_size / strategy.sequence_parallel_size,
            input_sequences=is_recomputed * strategy.micro_batch_size / strategy.granularity,
        )._replace(is_recomputed=is_recomputed)
        lengths = strategy.cut(self.workload.seq_length).lengths
        ranks, token_slices = strategy.pipeline_parallel_size, strategy.num_token_slices
        model_chunks, schedule = strategy.stages_of_a_rank, strategy.schedule
        if schedule == OPTIMISED:
            # Its limit is the peak of 1F1B, unless another limit is given (docs/concepts/schedules.md).
            schedule, limit = ("1f1b" if model_chunks == 1 else "interleaved"), limit or 1.0
        num_micro_batches = steady_micro_batches(schedule, ranks, token_slices, strategy.num_micro_batches)
        shape = PipelineShape(ranks * model_chunks, num_micro_batches, token_slices, model_chunks)
        blocks, of_ranks = [], iter(() if copies is None else copies.ranks)
        for order in self.orders(schedule, shape):
            blocks.append(peak_held(order, lengths, of_stage, tuple(islice(of_ranks, len(order.kind)))))
        held = Held(*(np.concatenate([np.atleast_1d(each) for each in part]) for part in zip(*blocks, strict=True)))
        if limit is None:
            return held
        # Every rank may hold as many micro-batches, on all its stages, as the first one does under 1F1B.
        live = limit * min(ranks - 1 + token_slices, strategy.num_micro_batches * token_slices) / token_slices
        live = min(live, strategy.num_micro_batches)
        activations, key_values, states = (
            live * np.reshape(each, (-1, ranks)).sum(axis=0)
            for each in (of_stage.token.activations, of_stage.token.key_values, of_stage.token.state)
        )
        states = (token_slices > 1) * token_slices * states
        return held._replace(activations=sum(lengths) * activations + states, key_values=sum(lengths) * key_values)

    def stage_bytes(
        self, counts: LayerCounts, of_kind: Floats, *, sequences: float = 1.0, input_sequences: ScalarOrArray = 0.0
    ) -> StageBytes:
        """Return the bytes of a token on each stage, [stages, ...], from the bytes in each kind of layer.

        Args:
            of_kind: [fields of `TokenMemory`, K, ...] as `token_bytes` has them.
            sequences: of a micro-batch, of which a rank has the tokens.
            input_sequences: [...] the same of the input of a stage that is recomputed; 0 where none is.
        """
        per_stage, shape = counts.per_stage, (len(counts.per_stage), -1, *(1,) * (of_kind.ndim - 2))
        stages = TokenMemory(*(sequences * stage_ops(per_stage, of_kind)))
        in_turn = of_kind[[TokenMemory._fields.index(name) for name in IN_TURN], None]
        present = sequences * np.where(per_stage.reshape(shape) > 0, in_turn, 0.0)
        is_head = np.array([layer.kind == "head" for layer in self.counter.kinds], dtype=bool)
        elements = stage_input_elements(self.workload, counts).reshape(-1, *shape[2:])
        inputs = ELEMENT_BYTES[self.precision] * elements * input_sequences
        most = dict(zip(IN_TURN, present[:, :, ~is_head].max(axis=2, initial=0.0), strict=True))
        return StageBytes(
            stages._replace(
                activations=stages.activations + inputs,
                freed_by_input_gradient=stages.freed_by_input_gradient + inputs,
                **most,
            ),
            inputs,
            head_working=present[0][:, is_head].max(axis=1, initial=0.0),
            limits=limits_of(self.software, ELEMENT_BYTES[self.precision], self.counter.kinds),
        )
