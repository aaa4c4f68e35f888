"""Peak memory of each pipeline rank of a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.copy_lanes import HostCopyPlan
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.simulate.wiring import OpColumns
from megatron_terapipe.search.cost.host_copies import stage_input_elements
from megatron_terapipe.search.cost.layer_counts import LayerCounter, LayerCounts
from megatron_terapipe.search.cost.memory.activations import ScalarOrArray, TokenMemory, logit_limits, token_memory
from megatron_terapipe.search.cost.memory.live import (
    Held,
    StageBytes,
    orders_of_ranks,
    peak_held,
    rank_order,
    steady_micro_batches,
)
from megatron_terapipe.search.cost.memory.overheads import Counted, MemoryOverheads, assemble, default_overheads
from megatron_terapipe.search.cost.memory.states import bucket_bytes, state_bytes
from megatron_terapipe.search.cost.prediction import RankMemory
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.software.description import ELEMENT_BYTES, Software
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]

WORKING, SCORES = TokenMemory._fields.index("working"), TokenMemory._fields.index("scores")

TRANSFERS = 3
"""Messages of one token slice that a stage holds beside its activations: one on its way in, one on its way out, and
the gradient that it works on."""


@dataclass(kw_only=True)
class MemoryModel:
    """Memory of strategies of one workload on one cluster."""

    workload: Workload
    """The model."""
    cluster: Cluster
    """What it runs on."""
    software: Software = TERAPIPE
    """What trains it."""
    precision: str = "bf16"
    """`fp16`, `bf16` or `fp32`."""
    overheads: MemoryOverheads = field(default=None)  # type: ignore[assignment]
    """What no count of tensors says; left out, the defaults of the cluster's devices."""
    counter: LayerCounter = field(init=False, repr=False)
    _orders: dict[tuple[str, PipelineShape], list[OpColumns]] = field(default_factory=dict, repr=False)
    _tokens: dict[tuple[object, ...], Floats] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Fill in the defaults."""
        if self.overheads is None:
            self.overheads = default_overheads(self.cluster, self.software)
        self.counter = LayerCounter(self.workload)

    def predict(
        self, strategy: Strategy, *, activation_limit: float | None = None, copies: HostCopyPlan | None = None
    ) -> tuple[RankMemory, ...]:
        """Peak memory of every pipeline rank: of the moment in which it holds the most.

        Args:
            activation_limit: activations that the schedule may hold on each rank, as a multiple of 1F1B's peak on the
                first; None = as the schedule does.
            copies: what waits on hosts, of as many micro-batches as `micro_batches_of_peak`; None = nothing.

        Raises:
            ConfigError: if its stages or token slices do not fit the workload.
        """
        counted = self.count(strategy, activation_limit=activation_limit, copies=copies)
        return tuple(assemble(rank, self.overheads) for rank in counted)

    def count(
        self, strategy: Strategy, *, activation_limit: float | None = None, copies: HostCopyPlan | None = None
    ) -> list[Counted]:
        """Return the counted memory of each rank, before overheads are applied; errors are those of `predict`.

        Args:
            activation_limit: largest activation memory of an `optimised` schedule; None = its default.
            copies: what waits on hosts; None = nothing.
        """
        ranks, tensor = strategy.pipeline_parallel_size, strategy.tensor_parallel_size
        partition = self.workload.partition(strategy.stage_partition, ranks * strategy.num_model_chunks)
        counts = self.counter.count(partition, ranks, tensor, vocabulary_stages=strategy.vocabulary_stages)
        longest = max(strategy.cut(self.workload.seq_length).lengths) / self.workload.seq_length
        own = strategy.granularity
        states = self.states(
            counts.parameters,
            layout=strategy.layout,
            zero_stage=strategy.zero_stage,
        )
        messages = self.message_bytes(ranks, strategy.micro_batch_size * longest / own)
        all_ranks = states.holding(self._held(strategy, counts, activation_limit, copies), messages)
        columns = (np.broadcast_to(np.asarray(part, dtype=float), ranks).tolist() for part in all_ranks)
        return [Counted(*rank) for rank in zip(*columns, strict=True)]

    def states(self, parameters: Floats, *, layout: ParallelLayout, zero_stage: int) -> Counted:
        """Count what ranks hold whatever they compute: weights, gradients, optimizer state, buckets, communicators.

        Args:
            parameters: [...] parameters of each rank.
            zero_stage: 0 or 1.
        """
        copies = layout.num_weight_copies
        each = state_bytes(self.software, self.precision, zero_stage=zero_stage, data_parallel_size=copies)
        groups = copies, layout.sequence_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size
        return Counted(
            weights=parameters * each.weights,
            gradients=parameters * each.gradients,
            optimizer=parameters * float(each.optimizer),
            step=parameters * float(each.step),
            buffers=bucket_bytes(self.software, self.precision, parameters, zero_stage),
            communicators=float(sum(size > 1 for size in groups)),
        )

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
        self, layout: ParallelLayout, recompute: str, sequence_parallel: bool, key_value_gradients: str = "fp32"
    ) -> Floats:
        """Return the bytes of one token of one sequence in each kind of layer: [fields of `TokenMemory`, K].

        Args:
            recompute: `none`, `selective`, `full` or `stage`.
            sequence_parallel: whether tensor-parallel ranks share the tokens between the matrices, too.
            key_value_gradients: type in which gradients of keys and values are kept.
        """
        sizes = layout.tensor_parallel_size, layout.sequence_parallel_size
        key = *sizes, recompute, sequence_parallel, key_value_gradients
        if key not in self._tokens:
            config = self.workload.config
            rows = [
                token_memory(
                    layer,
                    self.software,
                    element_bytes=ELEMENT_BYTES[self.precision],
                    tensor_parallel_size=sizes[0],
                    sequence_parallel_size=sizes[1],
                    recompute=recompute,
                    sequence_parallel=sequence_parallel,
                    key_value_gradients=key_value_gradients,
                    activation_is_read_off_output=config is not None and config.activation == "relu",
                )
                for layer in self.counter.kinds
            ]
            # A layer may have more rows of a sequence than the sequence has tokens, or fewer: windows, pooling.
            rows_per_token = np.array([layer.tokens / self.workload.seq_length for layer in self.counter.kinds])
            self._tokens[key] = rows_per_token * np.array([np.broadcast_arrays(*row) for row in rows], dtype=float).T
        return self._tokens[key]

    def fits(self, memory: Sequence[RankMemory]) -> bool:
        """Whether no device runs out of memory; every rank may be on the smallest."""
        smallest = min(node.device.memory_bytes for node in self.cluster.nodes)
        return max(rank.total for rank in memory) <= smallest * self.overheads.usable_share

    def micro_batches_of_peak(self, strategy: Strategy) -> int:
        """Return the micro-batches with which every rank reaches its peak; more repeat the steady state."""
        return steady_micro_batches(
            strategy.schedule,
            strategy.pipeline_parallel_size,
            strategy.num_token_slices,
            strategy.num_micro_batches,
        )

    def _held(self, strategy: Strategy, counts: LayerCounts, limit: float | None, copies: HostCopyPlan | None) -> Held:
        """[P] bytes that each rank holds at its peak."""
        of_stage = self._stage_bytes(strategy, counts)
        lengths = strategy.cut(self.workload.seq_length).lengths
        ranks, token_slices = strategy.pipeline_parallel_size, strategy.num_token_slices
        model_chunks, schedule = strategy.stages_of_a_rank, strategy.schedule
        if schedule == OPTIMISED:
            # It keeps within what 1F1B needs, unless told another limit (docs/concepts/schedules.md).
            schedule, limit = ("1f1b" if model_chunks == 1 else "interleaved"), limit or 1.0
        num_micro_batches = steady_micro_batches(schedule, ranks, token_slices, strategy.num_micro_batches)
        shape = PipelineShape(ranks * model_chunks, num_micro_batches, token_slices, model_chunks)
        if copies is None:
            blocks = [peak_held(order, lengths, of_stage) for order in self._orders_of_ranks(schedule, shape)]
        else:
            orders = (rank_order(schedule, shape, rank) for rank in range(ranks))
            pairs = zip(orders, copies.ranks, strict=True)
            blocks = [peak_held(order, lengths, of_stage, of_rank) for order, of_rank in pairs]
        held = Held(*(np.concatenate([np.atleast_1d(each) for each in part]) for part in zip(*blocks, strict=True)))
        if limit is None:
            return held
        # Every rank may hold as many micro-batches, on all its stages, as the first one does under 1F1B.
        live = limit * min(ranks - 1 + token_slices, strategy.num_micro_batches * token_slices) / token_slices
        tokens = min(live, strategy.num_micro_batches) * sum(lengths)
        return held._replace(
            activations=tokens * of_stage.activations.reshape(-1, ranks).sum(axis=0),
            key_values=tokens * of_stage.key_values.reshape(-1, ranks).sum(axis=0),
        )

    def _orders_of_ranks(self, schedule: str, shape: PipelineShape) -> list[OpColumns]:
        key = schedule, shape
        if key not in self._orders:
            self._orders[key] = orders_of_ranks(schedule, shape)
        return self._orders[key]

    def _stage_bytes(self, strategy: Strategy, counts: LayerCounts) -> StageBytes:
        """Bytes of a token of a micro-batch on each stage."""
        of_kind = self.token_bytes(
            strategy.layout, strategy.recompute, strategy.sequence_parallel, strategy.key_value_gradients
        )
        sequences = strategy.micro_batch_size / strategy.sequence_parallel_size
        stages = dict(zip(TokenMemory._fields, sequences * (of_kind @ counts.per_stage.T), strict=True))
        is_head = np.array([layer.kind == "head" for layer in self.counter.kinds], dtype=bool)
        # Of what layers hold while they run, only the most counts: they run one after the other.
        present, scores = (np.where(counts.per_stage > 0, of_kind[each], 0.0) for each in (WORKING, SCORES))
        is_recomputed = strategy.recompute == "stage"
        inputs = ELEMENT_BYTES[self.precision] * stage_input_elements(self.workload, counts)
        inputs = inputs * (strategy.micro_batch_size / strategy.granularity) * is_recomputed
        return StageBytes(
            activations=stages["activations"] + inputs,
            key_values=stages["key_values"],
            key_value_gradients=stages["key_value_gradients"],
            logits=stages["logits"],
            working=sequences * present[:, ~is_head].max(axis=1, initial=0.0),
            freed=stages["freed_by_input_gradient"] + inputs,
            recomputed=stages["recomputed"],
            is_recomputed=is_recomputed,
            scores=sequences * scores.max(axis=1, initial=0.0),
            window_gradients=stages["window_gradients"],
            head_working=sequences * present[:, is_head].max(axis=1, initial=0.0),
            limits=logit_limits(self.software, ELEMENT_BYTES[self.precision]),
        )
