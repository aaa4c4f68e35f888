"""All strategies of one layout of the ranks: a grid whose axes are the other dimensions.

    axis               order      partition  micro_batch  token_slices  recompute  sequence_parallel  zero
    holds              (schedule, how layers B            S             none ...   off, on            stage
                       V)         are dealt
    array of an axis   [O,1,1,..] [1,Q,1,..] [1,1,B,..]   ...

What depends on two dimensions is computed for the pairs alone; numpy's broadcasting makes it a value of every strategy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.balance import granularity_of
from megatron_terapipe.search.space.choices import SOLVED, Choices
from megatron_terapipe.search.space.problem import Problem
from megatron_terapipe.strategy import Strategy

Axis = Literal["order", "partition", "micro_batch", "token_slices", "recompute", "sequence_parallel", "zero"]

AXES: tuple[Axis, ...] = (
    "order",
    "partition",
    "micro_batch",
    "token_slices",
    "recompute",
    "sequence_parallel",
    "zero",
)

Partition = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StrategyGrid:
    """A grid of strategies with the same layout.

    Attributes:
        data_parallel_size: ranks that share the batch.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: pipeline ranks.
        global_batch_size: sequences of one optimizer step.
        order: schedules and model chunks, in pairs.
        partition: rules or bounds of stages.
        micro_batch: micro-batch sizes.
        token_slices: numbers of token slices.
        recompute: modes.
        sequence_parallel: off, on.
        zero: ZeRO stages.
        lengths: lengths of the token slices that the user pins.
    """

    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    global_batch_size: int
    order: tuple[tuple[str, int], ...]
    partition: tuple[Partition, ...]
    micro_batch: tuple[int, ...]
    token_slices: tuple[int, ...]
    recompute: tuple[str, ...]
    sequence_parallel: tuple[bool, ...]
    zero: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    @classmethod
    def of_choices(cls, choices: Choices, sizes: tuple[int, int, int], global_batch_size: int) -> "StrategyGrid":
        """All strategies of a layout.

        Args:
            choices: values of the other dimensions.
            sizes: data-, tensor- and pipeline-parallel size.
            global_batch_size: sequences of one optimizer step.
        """
        data, tensor, pipeline = sizes
        return cls(
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            global_batch_size=global_batch_size,
            order=choices.orders,
            partition=choices.stage_partition,
            micro_batch=choices.micro_batch_size,
            token_slices=choices.num_token_slices,
            recompute=choices.recompute,
            sequence_parallel=choices.sequence_parallel,
            zero=choices.zero_stage,
            lengths=choices.token_slices,
        )

    @classmethod
    def of_strategy(cls, strategy: Strategy) -> "StrategyGrid":
        """A grid of one strategy, so that rules for grids also judge it."""
        return cls(
            data_parallel_size=strategy.data_parallel_size,
            tensor_parallel_size=strategy.tensor_parallel_size,
            pipeline_parallel_size=strategy.pipeline_parallel_size,
            global_batch_size=strategy.global_batch_size or strategy.micro_batch_size * strategy.data_parallel_size,
            order=((strategy.schedule, strategy.num_model_chunks),),
            partition=(strategy.stage_partition,),
            micro_batch=(strategy.micro_batch_size,),
            token_slices=(strategy.num_token_slices,),
            recompute=(strategy.recompute,),
            sequence_parallel=(strategy.sequence_parallel,),
            zero=(strategy.zero_stage,),
            lengths=strategy.token_slices,
        )

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Values on each axis."""
        return tuple(len(getattr(self, axis)) for axis in AXES)

    @cached_property
    def size(self) -> int:
        """Strategies."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    def along(self, axis: Axis, values: Sequence[Any]) -> NDArray[Any]:
        """Values, one for each of an axis, as an array that broadcasts over the grid."""
        shape = [1] * len(AXES)
        shape[AXES.index(axis)] = -1
        return np.asarray(values).reshape(shape)

    @cached_property
    def model_chunks(self) -> NDArray[np.int64]:
        """Model model_chunks, along the axis `order`."""
        return self.along("order", [model_chunks for _, model_chunks in self.order])

    @cached_property
    def num_micro_batches(self) -> NDArray[np.int64]:
        """Micro-batches of a data-parallel rank, along `micro_batch`; for those that divide the batch."""
        sizes = np.array(self.micro_batch) * self.data_parallel_size
        return self.along("micro_batch", np.maximum(self.global_batch_size // sizes, 1))

    def keep(self, axis: Axis, kept: NDArray[np.bool_]) -> "StrategyGrid":
        """The grid with some of the values of one axis."""
        values = getattr(self, axis)
        changed: dict[str, Any] = {axis: tuple(value for value, keep in zip(values, kept, strict=True) if keep)}
        return replace(self, **changed)

    def strategy(self, place: Sequence[int], problem: Problem) -> Strategy:
        """The strategy at a place of the grid. A partition that is yet to be solved must be set in it afterwards.

        Args:
            place: index on each axis.
            problem: what is trained; the lengths of token slices follow from it.
        """
        at = dict(zip(AXES, place, strict=True))
        schedule, model_chunks = self.order[at["order"]]
        partition = self.partition[at["partition"]]
        count = self.token_slices[at["token_slices"]]
        sequence_parallel = self.sequence_parallel[at["sequence_parallel"]]
        return Strategy(
            data_parallel_size=self.data_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            num_model_chunks=model_chunks,
            num_token_slices=count,
            token_slices=self.cut(count, sequence_parallel, problem.workload.seq_length),
            micro_batch_size=self.micro_batch[at["micro_batch"]],
            global_batch_size=self.global_batch_size,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            recompute=self.recompute[at["recompute"]],
            zero_stage=self.zero[at["zero"]],
            stage_partition="uniform" if partition == SOLVED else partition,
        )

    def cut(self, num_token_slices: int, sequence_parallel: bool, seq_length: int) -> tuple[int, ...] | None:
        """Lengths of the token slices of a strategy of this grid; None for whole sequences."""
        if self.lengths is not None:
            return self.lengths
        if num_token_slices == 1:
            return None
        needed = self.tensor_parallel_size if sequence_parallel else 1
        granularity = granularity_of(seq_length, num_token_slices, needed)
        return TokenSlices.uniform(seq_length, num_token_slices, granularity=granularity).lengths
