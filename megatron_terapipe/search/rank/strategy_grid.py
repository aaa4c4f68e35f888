"""Grids of strategies: all of one layout of the ranks, with the other dimensions as axes.

    axis               order      partition  micro_batch  token_slices  recompute  sequence_parallel  zero
    holds              (schedule, how layers B            S             (none ..., off, on            (stage,
                       V)         are dealt                             offload)                      shard size)
    array of an axis   [O,1,1,..] [1,Q,1,..] [1,1,B,..]   ...

Values that depend on two dimensions are computed once for each pair; numpy broadcasts them over the grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.flops import granularity_of
from megatron_terapipe.search.rank.space import Choices, SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, SOLVED, Strategy

Axis = Literal["order", "partition", "micro_batch", "token_slices", "recompute", "sequence_parallel", "zero"]

AXES: tuple[Axis, ...] = get_args(Axis)

ON_AXIS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {axis: tuple(each.name for each in DIMENSIONS if each.axis == axis) for axis in AXES}
)
"""Names of the dimensions on each axis: one, or two of which the axis holds pairs."""

SHARED = tuple(each.name for each in DIMENSIONS if not each.axis)
"""Names of the dimensions that all strategies of a grid have the same value of."""

Partition = str | tuple[int, ...]

Row = tuple[ParallelLayout, int | None]
"""Row of a ranking: the layout of its strategies, and the ranks that divide states."""


@dataclass(frozen=True, kw_only=True)
class StrategyGrid:
    """A grid of strategies with the same layout.

    The axes are those that formulas read as arrays. Which dimension is on which axis, `Strategy` declares.
    """

    shared: Mapping[str, Any]
    """The values that all strategies of the grid have, by the name of the dimension."""
    order: tuple[tuple[str, int], ...]
    partition: tuple[Partition, ...]
    micro_batch: tuple[int, ...]
    token_slices: tuple[int, ...]
    recompute: tuple[tuple[str, bool], ...]
    """Modes of recomputation, and whether token slices are offloaded, in pairs."""
    sequence_parallel: tuple[bool, ...]
    zero: tuple[tuple[int, int | None], ...]
    """ZeRO stages, and numbers of ranks that divide states, in pairs."""

    @classmethod
    def of_choices(cls, choices: Choices, sizes: Mapping[str, int], global_batch_size: int) -> "StrategyGrid":
        """Return all strategies of a layout: [order, partition, micro_batch, ...]."""
        lengths = choices.values.get("token_slices")
        return cls(
            shared={**sizes, "global_batch_size": global_batch_size, "token_slices": lengths},
            **{axis: choices.along(axis) for axis in AXES},
        )

    @classmethod
    def of_strategy(cls, strategy: Strategy) -> "StrategyGrid":
        """Return a grid of one strategy, [1, 1, 1, 1, 1, 1, 1], for the functions of grids."""
        shared = {name: getattr(strategy, name) for name in SHARED}
        shared["global_batch_size"] = (
            strategy.global_batch_size or strategy.micro_batch_size * strategy.data_parallel_size
        )
        values: dict[str, Any] = {}
        for axis in AXES:
            value = tuple(getattr(strategy, name) for name in ON_AXIS[axis])
            values[axis] = value if len(value) == 1 else (value,)
        return cls(shared=shared, **values)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        return int(self.shared["global_batch_size"])

    @property
    def key_value_gradients(self) -> str:
        """Type in which gradients of keys and values are kept."""
        return str(self.shared["key_value_gradients"])

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Lengths of the token slices that all strategies have, in tokens; None = they follow from the number."""
        lengths: tuple[int, ...] | None = self.shared["token_slices"]
        return lengths

    @cached_property
    def layout(self) -> ParallelLayout:
        """Sizes of the parallel axes."""
        return ParallelLayout(**{name: size for name, size in self.shared.items() if hasattr(ParallelLayout, name)})

    @property
    def rows(self) -> list[Row]:
        """Row of a ranking that strategies with each value of the axis `zero` are in."""
        return [(self.layout, size) for _, size in self.zero]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.shared[each.name] for each in DIMENSIONS if each.ranks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values on each axis."""
        return tuple(len(getattr(self, axis)) for axis in AXES)

    @cached_property
    def size(self) -> int:
        """Number of strategies."""
        return prod(self.shape)

    def along(self, axes: Axis | Sequence[Axis], values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        """Return values as an array that broadcasts over the grid.

        Args:
            values: one for each value of the axis; for several, one for each of their pairs, nested: [axis, axis].
        """
        names = (axes,) if isinstance(axes, str) else axes
        shape = [len(getattr(self, axis)) if axis in names else 1 for axis in AXES]
        return np.asarray(values).reshape(shape)

    @cached_property
    def model_chunks(self) -> NDArray[np.int64]:
        """Model chunks of a pipeline rank: [order, 1, 1, 1, 1, 1, 1]."""
        return self.along("order", [model_chunks for _, model_chunks in self.order])

    @cached_property
    def num_micro_batches(self) -> NDArray[np.int64]:
        """Micro-batches of a data-parallel rank: [1, 1, micro_batch, 1, 1, 1, 1], for sizes that divide the batch."""
        sizes = np.array(self.micro_batch) * self.layout.data_parallel_size
        return self.along("micro_batch", np.maximum(self.global_batch_size // sizes, 1))

    def keep(self, axis: Axis, kept: NDArray[np.bool_]) -> "StrategyGrid":
        """Return the grid with the values of one axis that `kept` [values] marks."""
        values = getattr(self, axis)
        changed: dict[str, Any] = {axis: tuple(value for value, keep in zip(values, kept, strict=True) if keep)}
        return replace(self, **changed)

    def strategy(self, place: Sequence[int], problem: SearchProblem) -> Strategy:
        """Return the strategy at a place of the grid; a partition that is yet to be solved must be set afterwards."""
        values = dict(self.shared)
        for axis, index in zip(AXES, place, strict=True):
            names = ON_AXIS[axis]
            value = getattr(self, axis)[index]
            values.update(zip(names, value if len(names) > 1 else (value,), strict=True))
        if values["stage_partition"] == SOLVED:
            values["stage_partition"] = "uniform"
        count, parallel = values["num_token_slices"], values["sequence_parallel"]
        values["token_slices"] = self.cut(count, parallel, problem.workload.seq_length)
        return Strategy(**values)

    def granularity(self, sequence_parallel: bool) -> int:
        """Return the tokens of which every token slice needs a multiple; see `Strategy.granularity`."""
        return self.layout.sequence_parallel_size * (self.layout.tensor_parallel_size if sequence_parallel else 1)

    def cut(self, num_token_slices: int, sequence_parallel: bool, seq_length: int) -> tuple[int, ...] | None:
        """Return the lengths in tokens of the token slices of a strategy of this grid; None for whole sequences."""
        if self.lengths is not None:
            return self.lengths
        if num_token_slices == 1:
            return None
        granularity = granularity_of(seq_length, num_token_slices, self.granularity(sequence_parallel))
        return TokenSlices.uniform(seq_length, num_token_slices, granularity=granularity).lengths
