"""Peak memory of each pipeline rank of a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepspeed_ext.plan.ops import PipelineShape
from megatron_terapipe.config.parallel import OPTIMISED
from megatron_terapipe.search.cost.activation_memory import TokenMemory, logit_limits, token_memory
from megatron_terapipe.search.cost.live_memory import (
    Held,
    RankOrder,
    StageBytes,
    peak_held,
    rank_order,
    steady_micro_batches,
)
from megatron_terapipe.search.cost.memory_overheads import Counted, MemoryOverheads, assemble, default_overheads
from megatron_terapipe.search.cost.prediction import RankMemory
from megatron_terapipe.search.cost.state_memory import bucket_bytes, state_bytes
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.inputs.workload import Workload, parameters_per_rank
from megatron_terapipe.search.op_times.software import TERAPIPE, Software
from megatron_terapipe.strategy import Strategy

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
"""Bytes of an activation."""

WORKING = TokenMemory._fields.index("working")

TRANSFERS = 3
"""Messages of one token slice that a stage holds beside its activations: one on its way in, one on its way out, and
the gradient that it works on."""


@dataclass(kw_only=True)
class MemoryModel:
    """Memory of strategies of one workload on one cluster.

    Attributes:
        workload: the model.
        cluster: what it runs on.
        software: what trains it.
        precision: `fp16`, `bf16` or `fp32`.
        overheads: what no count of tensors says; left out, the defaults of the cluster's devices.
    """

    workload: Workload
    cluster: Cluster
    software: Software = TERAPIPE
    precision: str = "bf16"
    overheads: MemoryOverheads = field(default=None)  # type: ignore[assignment]
    _orders: dict[tuple[str, PipelineShape], list[RankOrder]] = field(default_factory=dict, repr=False)
    _layers: dict[tuple[Layer, int, str, bool], TokenMemory] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Fill in the defaults."""
        if self.overheads is None:
            self.overheads = default_overheads(self.cluster)

    def predict(self, strategy: Strategy, *, activation_limit: float | None = None) -> tuple[RankMemory, ...]:
        """Peak memory of every pipeline rank: of the moment in which it holds the most.

        Args:
            strategy: how it is trained.
            activation_limit: activations that the schedule may hold on each rank, as a multiple of 1F1B's peak on the
                first; None = as the schedule does.

        Raises:
            ConfigError: if its stages or token slices do not fit the workload.
        """
        counted = self.count(strategy, activation_limit=activation_limit)
        return tuple(assemble(rank, self.overheads) for rank in counted)

    def count(self, strategy: Strategy, *, activation_limit: float | None = None) -> list[Counted]:
        """What `predict` counts, for each rank, before overheads are applied; arguments and errors as there."""
        ranks = strategy.pipeline_parallel_size
        stages = self._stages(strategy)
        held = self._held(strategy, stages, activation_limit)
        states = state_bytes(
            self.software.name,
            self.precision,
            zero_stage=strategy.zero_stage,
            data_parallel_size=strategy.data_parallel_size,
        )
        communicators = sum(size > 1 for size in (strategy.data_parallel_size, strategy.tensor_parallel_size, ranks))
        transfers = 0.0 if ranks == 1 else TRANSFERS * self._message_bytes(strategy)
        parameters_of = parameters_per_rank(self.workload, stages, ranks, strategy.tensor_parallel_size).total
        counted = []
        for peak, parameters in zip(held, parameters_of, strict=True):
            buckets = float(bucket_bytes(self.software.name, self.precision, parameters, strategy.zero_stage))
            counted.append(
                Counted(
                    weights=parameters * states.weights,
                    gradients=parameters * states.gradients,
                    optimizer=parameters * float(states.optimizer),
                    step=parameters * float(states.step),
                    activations=peak.activations,
                    key_values=peak.key_values,
                    logits=peak.logits,
                    working=peak.working,
                    buffers=transfers + buckets,
                    communicators=float(communicators),
                )
            )
        return counted

    def fits(self, memory: Sequence[RankMemory]) -> bool:
        """Whether no device runs out of memory; every rank may be on the smallest."""
        smallest = min(node.device.memory_bytes for node in self.cluster.nodes)
        return max(rank.total for rank in memory) <= smallest * self.overheads.usable_share

    def _stages(self, strategy: Strategy) -> list[range]:
        num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
        return self.workload.stages(self.workload.partition(strategy.stage_partition, num_stages))

    def _message_bytes(self, strategy: Strategy) -> float:
        """What flows between two stages for one token slice."""
        longest = max(strategy.cut(self.workload.seq_length).lengths) / self.workload.seq_length
        elements = max(layer.output_elements for layer in self.workload.layers)
        # Under sequence parallelism a tensor-parallel rank has its part of the tokens alone between layers.
        ranks = strategy.tensor_parallel_size if strategy.sequence_parallel else 1
        return ELEMENT_BYTES[self.precision] * strategy.micro_batch_size * longest * elements / ranks

    def _held(self, strategy: Strategy, stages: Sequence[range], limit: float | None) -> list[Held]:
        """What each rank holds at its peak."""
        of_stage = self._stage_bytes(strategy, stages)
        lengths = strategy.cut(self.workload.seq_length).lengths
        ranks, token_slices = strategy.pipeline_parallel_size, strategy.num_token_slices
        model_chunks, schedule = strategy.num_model_chunks, strategy.schedule
        if schedule == OPTIMISED:
            # It keeps within what 1F1B needs, unless told another limit (docs/schedules.md).
            schedule, limit = ("1f1b" if model_chunks == 1 else "interleaved"), limit or 1.0
        num_micro_batches = steady_micro_batches(schedule, ranks, token_slices, strategy.num_micro_batches)
        shape = PipelineShape(ranks * model_chunks, num_micro_batches, token_slices, model_chunks)
        held = [peak_held(order, lengths, of_stage) for order in self._rank_orders(schedule, shape)]
        if limit is None:
            return held
        # Every rank may hold as many micro-batches, on all its stages, as the first one does under 1F1B.
        live = limit * min(ranks - 1 + token_slices, strategy.num_micro_batches * token_slices) / token_slices
        tokens = min(live, strategy.num_micro_batches) * sum(lengths)
        return [
            Held(
                activations=tokens * float(of_stage.activations[rank::ranks].sum()),
                key_values=tokens * float(of_stage.key_values[rank::ranks].sum()),
                logits=peak.logits,
                working=peak.working,
            )
            for rank, peak in enumerate(held)
        ]

    def _rank_orders(self, schedule: str, shape: PipelineShape) -> list[RankOrder]:
        key = schedule, shape
        if key not in self._orders:
            self._orders[key] = [rank_order(schedule, shape, rank) for rank in range(shape.num_ranks)]
        return self._orders[key]

    def _stage_bytes(self, strategy: Strategy, stages: Sequence[range]) -> StageBytes:
        """Bytes of a token of a micro-batch on each stage."""
        rows = []
        for stage in stages:
            layers = [self.workload.layers[index] for index in stage]
            memories = [self._layer_memory(layer, strategy) for layer in layers]
            # A layer may have more rows of a sequence than the sequence has tokens, or fewer: windows, pooling.
            rows_per_token = np.array([layer.tokens / self.workload.seq_length for layer in layers])
            kept = rows_per_token[:, None] * np.array(memories, dtype=float).reshape(
                len(layers), len(TokenMemory._fields)
            )
            heads = np.array([layer.kind == "head" for layer in layers], dtype=bool)
            sums, working = kept.sum(axis=0), kept[~heads, WORKING].max(initial=0.0)
            rows.append((*sums[:WORKING], working, *sums[WORKING + 1 :], kept[heads, WORKING].max(initial=0.0)))
        limits = logit_limits(self.software, ELEMENT_BYTES[self.precision])
        return StageBytes(*(strategy.micro_batch_size * np.array(rows).T))._replace(limits=limits)

    def _layer_memory(self, layer: Layer, strategy: Strategy) -> TokenMemory:
        key = (layer, strategy.tensor_parallel_size, strategy.recompute, strategy.sequence_parallel)
        if key not in self._layers:
            config = self.workload.config
            self._layers[key] = token_memory(
                layer,
                self.software,
                element_bytes=ELEMENT_BYTES[self.precision],
                tensor_parallel_size=strategy.tensor_parallel_size,
                recompute=strategy.recompute,
                sequence_parallel=strategy.sequence_parallel,
                activation_is_read_off_output=config is not None and config.activation == "relu",
            )
        return self._layers[key]


def predict_memory(
    workload: Workload,
    cluster: Cluster,
    strategy: Strategy,
    *,
    software: Software = TERAPIPE,
    precision: str = "bf16",
    overheads: MemoryOverheads | None = None,
    activation_limit: float | None = None,
) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank; see `MemoryModel.predict`, which is faster for many strategies."""
    model = MemoryModel(
        workload=workload,
        cluster=cluster,
        software=software,
        precision=precision,
        overheads=overheads or default_overheads(cluster),
    )
    return model.predict(strategy, activation_limit=activation_limit)
