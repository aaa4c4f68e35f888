"""What the optimiser works on: the pipeline, its costs and the memory limit as arrays.

Kinds are numbers here: 0 forward, 1 input gradient, 2 weight gradient, 3 whole backward. A unit is a token slice of a
micro-batch, `micro_batch * S + token_slice`. An op is one number, `(kind * N + stage) * M * S + unit`, for N stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.dependencies import reading_stage
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs import Channel

Numbers = np.ndarray[Any, Any]

KINDS = (OpKind.FORWARD, OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT, OpKind.BACKWARD)
"""Kinds of ops by their numbers."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = range(4)

ROUNDING = 1e-9
"""How far sums of shares may be over the limit, in activations of one micro-batch."""


class Tables(NamedTuple):
    """Arrays that the kernels read. N stages on P ranks with V model chunks each, S token slices.

    Results are those of forwards (0) and of input gradients (1); they go to the stage after, or before.
    """

    num_micro_batches: int
    rank_of: Numbers
    """[N] rank of each stage."""
    stages: Numbers
    """[P, V] stages of each rank, first to last."""
    times: Numbers
    """[3, N, S] time of F, BI and BW."""
    activation: Numbers
    """[S] what a token slice keeps on one stage, in activations of one micro-batch on one rank."""
    channel: Numbers
    """[2, N] number of the channel that a result takes; -1 where it stays on its rank."""
    sending: Numbers
    """[2, N, S] time for which the result keeps its channel busy."""
    latency: Numbers
    """[2, N] time from then until it is there."""
    free: Numbers
    """[channels] scratch: when each channel is free."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A pipeline to find op orders for.

    Attributes:
        shape: extent of the pipeline.
        costs: what ops and transfers take.
        lengths: shares of the token slices in the sequence.
        memory_limit: activations of one micro-batch that a rank may hold; infinite if there is none.
        is_split: whether backwards may be in two parts: the costs tell weight gradients apart.
        tables: the same as arrays.
    """

    shape: PipelineShape
    costs: OpCosts
    lengths: tuple[float, ...]
    memory_limit: float
    is_split: bool
    tables: Tables

    @classmethod
    def of(
        cls,
        shape: PipelineShape,
        costs: OpCosts,
        memory_limit: float | None = None,
        lengths: Sequence[float] | None = None,
    ) -> "Problem":
        """Make the arrays.

        Raises:
            PlanError: if a rank may not even hold one micro-batch, or there are not as many lengths as token slices.
        """
        if memory_limit is not None and not memory_limit >= 1:
            raise PlanError(
                f"memory limit {memory_limit} is less than one micro-batch, all of which is forward before its "
                "backward begins: give 1 or more"
            )
        lengths = (1.0,) * shape.num_token_slices if lengths is None else tuple(lengths)
        if len(lengths) != shape.num_token_slices or not all(0 < length < inf for length in lengths):
            raise PlanError(
                f"lengths {list(lengths)} for {shape.num_token_slices} token slices: give one above 0 for each of them"
            )
        shares = tuple(length / sum(lengths) for length in lengths)
        limit = inf if memory_limit is None else memory_limit
        return cls(shape, costs, shares, limit, costs.weight_gradient is not None, _tables(shape, costs, shares))

    @property
    def num_units(self) -> int:
        """Token slices of all micro-batches: what each stage works on."""
        return self.shape.num_micro_batches * self.shape.num_token_slices

    @property
    def num_ops(self) -> int:
        """Ops of all ranks, backwards in two parts."""
        return 3 * self.shape.num_stages * self.num_units

    @property
    def work(self) -> Numbers:
        """[P] time that each rank computes for."""
        by_stage = self.tables.times.sum(axis=(0, 2)) * self.shape.num_micro_batches
        return np.bincount(self.tables.rank_of, by_stage, self.shape.num_ranks)

    def bubble_ratio(self, makespan: float) -> float:
        """Idle time over ranks x makespan."""
        return 1 - float(self.work.sum()) / (self.shape.num_ranks * makespan) if makespan else 0.0

    def numbered(self, orders: Sequence[Sequence[Op]]) -> list[Numbers]:
        """Ops of each rank as numbers."""
        numbers = {kind: number for number, kind in enumerate(KINDS)}
        return [
            np.array(
                [
                    (numbers[op.kind] * self.shape.num_stages + op.stage) * self.num_units
                    + op.micro_batch * self.shape.num_token_slices
                    + op.token_slice
                    for op in order
                ],
                np.int64,
            )
            for order in orders
        ]

    def named(self, rows: Sequence[Numbers]) -> tuple[tuple[Op, ...], ...]:
        """Numbers of each rank as ops."""
        return tuple(tuple(self._op(number) for number in row.tolist()) for row in rows)

    def _op(self, number: int) -> Op:
        place, unit = divmod(number, self.num_units)
        kind, stage = divmod(place, self.shape.num_stages)
        return Op(KINDS[kind], stage, *divmod(unit, self.shape.num_token_slices))


def _tables(shape: PipelineShape, costs: OpCosts, shares: Sequence[float]) -> Tables:
    times = [costs.forward, costs.backward]
    times.append(costs.weight_gradient or ((0.0,) * shape.num_token_slices,) * shape.num_stages)
    rank_of = [shape.rank_of(stage) for stage in range(shape.num_stages)]
    channel = np.full((2, shape.num_stages), -1, np.int64)
    sending = np.zeros((2, shape.num_stages, shape.num_token_slices))
    latency = np.zeros((2, shape.num_stages))
    numbers: dict[Channel, int] = {}
    for result, kind in enumerate((OpKind.FORWARD, OpKind.INPUT_GRADIENT)):
        for stage in range(shape.num_stages):
            target = reading_stage(Op(kind, stage, 0, 0), shape)
            if target is None or rank_of[target] == rank_of[stage]:
                continue
            way = Channel(rank_of[stage], rank_of[target], kind)
            channel[result, stage] = numbers.setdefault(way, len(numbers))
            boundary = min(stage, target)
            latency[result, stage] = costs.latency(boundary)
            sending[result, stage] = [costs.sending_time(boundary, at) for at in range(shape.num_token_slices)]
    return Tables(
        shape.num_micro_batches,
        np.array(rank_of, np.int64),
        np.array([list(shape.stages_of(rank)) for rank in range(shape.num_ranks)], np.int64),
        np.array(times, np.float64),
        np.array(shares, np.float64) / shape.num_model_chunks,
        channel,
        sending,
        latency,
        np.zeros(max(len(numbers), 1)),
    )
