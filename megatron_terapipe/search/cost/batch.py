"""Times of many strategies of one kind at once, in closed form: their numbers are arrays, and physics is free to change.

Strategies of a batch have one workload, one kind of device, and all that is no number (recompute, software, ...) in
common. What their layouts make of the cluster is looked up once; each new `Physics` then costs a few array operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.collectives import Span, all_gather_s, transfer_s
from megatron_terapipe.search.cost.closed_form import pipeline_time, total_s
from megatron_terapipe.search.cost.model import CostModel, span_at
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.cost.roofline import Roofline
from megatron_terapipe.search.cost.stage_ops import StageOps, layer_ops
from megatron_terapipe.search.cost.step_costs import step_costs
from megatron_terapipe.search.workload import Layer
from megatron_terapipe.strategy import Strategy

Floats = NDArray[np.float64]


def batch_key(model: CostModel, strategy: Strategy) -> tuple[object, ...]:
    """What strategies of one batch have in common."""
    return (
        id(model.workload),
        model.groups(strategy).devices[0],
        model.software,
        model.element_bytes,
        strategy.schedule,
        strategy.recompute,
        strategy.sequence_parallel,
        strategy.zero_stage,
        strategy.cut(model.workload.seq_length).lengths,
    )


@dataclass(frozen=True)
class Batch:
    """n strategies, ready to be priced. Make it with `of`.

    Attributes:
        model: of one of them; for what they have in common.
        strategy: one of them, likewise.
        layers: the U different layers.
        counts: [n, stages, U] of each in each stage; stages that a strategy does not have hold none.
        rank_of_stage: [n, stages] pipeline rank.
        numbers: [n] by name.
        tensor_span: links of tensor-parallel ranks, of arrays [n].
        data_span: of data-parallel ranks.
        ends_span: of the first and the last pipeline rank.
        parameters: [n, ranks] that a rank holds.
        shared: [n, ranks] of them those of a weight that two ranks hold.
        message: [n, stages] bytes that a stage sends to the next in one micro-batch; 0 = nothing to send.
        bandwidth: [n, stages] of that link.
        latency: [n, stages].
    """

    model: CostModel
    strategy: Strategy
    layers: tuple[Layer, ...]
    counts: Floats
    rank_of_stage: NDArray[np.int64]
    numbers: dict[str, Floats]
    tensor_span: Span
    data_span: Span
    ends_span: Span
    parameters: Floats
    shared: Floats
    message: Floats
    bandwidth: Floats
    latency: Floats

    @classmethod
    def of(cls, models: Sequence[CostModel], strategies: Sequence[Strategy]) -> "Batch":
        """Look up what layouts make of clusters.

        Args:
            models: of each strategy; they share the workload.
            strategies: with one `batch_key`.
        """
        workload = models[0].workload
        unique = list({id(layer): layer for layer in workload.layers}.values())
        place = {id(layer): index for index, layer in enumerate(unique)}
        num = len(strategies)
        ranks = max(one.pipeline_parallel_size for one in strategies)
        stages = max(one.pipeline_parallel_size * one.num_model_chunks for one in strategies)
        counts = np.zeros((num, stages, len(unique)))
        rank_of_stage = np.zeros((num, stages), np.int64)
        parameters, shared = np.zeros((num, ranks)), np.zeros((num, ranks))
        message, latency = np.zeros((num, stages)), np.zeros((num, stages))
        bandwidth = np.ones((num, stages))
        spans: dict[str, list[Span]] = {"tensor": [], "data": [], "ends": []}
        for row, (model, one) in enumerate(zip(models, strategies, strict=True)):
            groups = model.groups(one)
            for stage, layers in enumerate(model.stage_layers(one)):
                rank_of_stage[row, stage] = stage % one.pipeline_parallel_size
                for index in layers:
                    counts[row, stage, place[id(workload.layers[index])]] += 1
            parameters[row, : one.pipeline_parallel_size], shared[row, : one.pipeline_parallel_size] = (
                model.parameters(one)
            )
            if one.pipeline_parallel_size > 1:
                sizes, speeds, delays = model.messages(one, groups)
                boundaries = len(sizes)
                message[row, :boundaries] = sizes.sum(axis=1)
                bandwidth[row, :boundaries], latency[row, :boundaries] = speeds, delays
            spans["tensor"].append(span_at(groups.tensor, 0))
            spans["data"].append(span_at(groups.data, 0))
            spans["ends"].append(span_at(groups.ends, 0))
        names = [each.name for each in fields(Strategy)]
        numbers = {
            name: np.array([getattr(one, name) for one in strategies], dtype=float)
            for name in (*names[:6], "num_micro_batches", "num_model_chunks")
        }
        joined = {name: Span(*map(np.array, zip(*rows, strict=True))) for name, rows in spans.items()}
        return cls(
            models[0],
            strategies[0],
            tuple(unique),
            counts,
            rank_of_stage,
            numbers,
            joined["tensor"],
            joined["data"],
            joined["ends"],
            parameters,
            shared,
            message,
            bandwidth,
            latency,
        )
