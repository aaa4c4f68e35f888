"""The space of a search: the question, the values that are tried for each dimension, and grids of strategies.

    SearchProblem -> Choices (values of each dimension) -> StrategyGrid (all strategies of one layout of the ranks)

The dimensions that are not of the layout are the axes of a grid:

    axis               order      partition  micro_batch  token_slices  recompute  sequence_parallel  zero
    holds              (schedule, how layers B            S             (none ..., off, on            (stage,
                       V)         are dealt                             offload)                      shard size)
    array of an axis   [O,1,1,..] [1,Q,1,..] [1,1,B,..]   ...

Values that depend on two dimensions are computed once for each pair; numpy broadcasts them over the grid. Loads neither
numpy nor pydantic: the flags of all commands need it for their help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.flops import granularity_of
from megatron_terapipe.dimensions import Dimension, Tried
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.strategy import DIMENSIONS, LATENT_KEPT, SOLVED, KeptKeys, Strategy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Choices", "SearchProblem", "all_choices"]

MEMORY_HEADROOM = 0.05
"""Default share of a device's memory that is kept free: predictions are a few per cent off."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A model to train on a cluster, with a batch."""

    workload: Workload
    cluster: Cluster
    """The machines, in the order of their hostfile."""
    global_batch_size: int
    precision: str = "bf16"
    software: Software = TERAPIPE
    """The trainer that will run the answer."""
    memory_headroom: float = MEMORY_HEADROOM
    """Share of every device's memory that strategies leave free, in [0, 1)."""
    interleaves_token_slices: bool = False
    """Whether flags name schedules and token slices, or trials on such devices have model chunks and token slices."""
    _partitions: dict[tuple[str, int], StagePartition] = field(default_factory=dict, compare=False, repr=False)

    def partition(self, stage_partition: str | tuple[int, ...], num_stages: int) -> StagePartition:
        """Return the layers of each stage; the stages of a rule are computed once."""
        if not isinstance(stage_partition, str):
            return self.workload.partition(stage_partition, num_stages)
        key = (stage_partition, num_stages)
        if key not in self._partitions:
            self._partitions[key] = self.workload.partition(stage_partition, num_stages)
        return self._partitions[key]

    @property
    def may_interleave_slices(self) -> bool:
        """Whether several model chunks are tried with token slices: also on CPUs, where they were measured."""
        return self.interleaves_token_slices or not any(node.device.is_gpu for node in self.cluster.nodes)

    @cached_property
    def has_equal_layers(self) -> bool:
        """Whether all layers that a stage partition counts have the same number of parameters."""
        workload = self.workload
        return len({layer.parameters for layer in workload.layers[workload.first_dealt : workload.end_dealt]}) == 1


NUMBERS_OF_TOKEN_SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of token slices that are tried

LONG_SEQUENCE = 16_384
"""Tokens from which values for long sequences are tried. In shorter ones other strategies fit the memory, and a part
of a token slice has too few rows to fill a device."""


TOKENS_OF_A_RANK = 8192  # tokens that a rank of a ring has at least, or half of a sequence of as many


@dataclass(frozen=True)
class Choices:
    """Values of each dimension, in the order in which ties are broken."""

    values: Mapping[str, tuple[Any, ...] | None]
    """By the name of the dimension. None is the size that the others leave over. `token_slices` holds the lengths of
    the one cut of a flag, and `num_token_slices` then only their number."""

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        """Return the values of a dimension that is searched."""
        values = self.values[name]
        assert values is not None, name
        return values

    def along(self, axis: str) -> tuple[Any, ...]:
        """Return the values of an axis of `StrategyGrid`: of its dimension, or pairs where it has two."""
        names = [each.name for each in DIMENSIONS if each.axis == axis]
        return self[names[0]] if len(names) == 1 else tuple(product(*map(self.__getitem__, names)))

    @property
    def per_layout(self) -> int:
        """Number of strategies of one layout of the ranks."""
        return prod(len(self[each.name]) for each in DIMENSIONS if each.axis)

    def constrained(self, constraints: Mapping[str, tuple[Any, ...]]) -> "Choices":
        """Return these choices with other values for some dimensions."""
        assert constraints.keys() <= {each.name for each in DIMENSIONS}, constraints
        lengths = constraints.get("token_slices")
        if lengths is None:
            return Choices({**self.values, **constraints})
        counts = constraints.get("num_token_slices", (len(lengths),))
        if counts != (len(lengths),):
            raise ConfigError(
                f"--num-token-slices {','.join(map(str, counts))} contradicts --token-slices, which lists "
                f"{len(lengths)}: drop the former"
            )
        return Choices({**self.values, **constraints, "num_token_slices": counts})


def all_choices(problem: SearchProblem) -> Choices:
    """Return all values that are tried where no flag constrains them."""
    return Choices({each.name: _runnable(each, problem) for each in DIMENSIONS if each.tried is not None})


def check_runnable(constraints: Mapping[str, tuple[Any, ...]], software: Software) -> None:
    """Check that the trainer can run the values of flags."""
    for each in DIMENSIONS:
        for value in constraints.get(each.name, ()) if each.name != "token_slices" else ():
            if not software.can_run(each.name, value):
                known = " or ".join(str(each) for each in dict(software.runs)[each.name] if each is not None)
                remedy = f"write {known}" if known else "leave it out"
                raise ConfigError(f"{each.flag} {value} does not run in {software.name}: {remedy}")


def _runnable(dimension: Dimension, problem: SearchProblem) -> tuple[Any, ...] | None:
    """Return the values to try that the trainer can run."""
    values = _tried(dimension, problem)
    if values is None:
        return None
    return tuple(value for value in values if problem.software.can_run(dimension.name, value))


def _tried(dimension: Dimension, problem: SearchProblem) -> tuple[Any, ...] | None:
    workload = problem.workload
    match dimension.tried:
        case Tried.REST_OF_DEVICES:
            return None
        case Tried.DIVISORS_OF_DEVICES:
            return divisors(problem.cluster.num_devices)
        case Tried.DIVISORS_OF_BATCH:
            return divisors(problem.global_batch_size)
        case Tried.COUNTS_OF_TOKEN_SLICES:
            if not workload.can_cut_tokens:
                return (1,)
            return tuple(count for count in NUMBERS_OF_TOKEN_SLICES if count <= workload.seq_length)
        case Tried.SHARES_OF_HEADS:
            return _shares_of_heads(problem)
        case Tried.SHARES_OF_EXPERTS:
            number = 1 if workload.experts is None else workload.experts.number
            return tuple(size for size in divisors(problem.cluster.num_devices) if number % size == 0)
        case Tried.KEPT_OF_LATENTS:
            has_latents = any(each.attention is not None and each.attention.latent for each in workload.layers)
            return LATENT_KEPT if has_latents and workload.can_cut_tokens else LATENT_KEPT[:1]
        case Tried.SHARDS_OF_A_NODE:
            nodes = problem.cluster.nodes
            return (None, *(divisors(nodes[0].num_devices)[1:] if len(nodes) > 1 else ()))
        case values:
            is_long = workload.seq_length >= LONG_SEQUENCE
            return values if values is None or not is_long else (*values, *dimension.tried_if_long)


def _shares_of_heads(problem: SearchProblem) -> tuple[int, ...]:
    """Sizes with which ranks can share tokens, or all heads of attention and recurrences, and all devices are used."""
    workload = problem.workload
    if problem.software.communication.ring and workload.can_cut_tokens:
        of_sequence = workload.seq_length // TOKENS_OF_A_RANK
        most = max(of_sequence, min(2 * of_sequence, 2), 1)
        return tuple(size for size in divisors(problem.cluster.num_devices) if size <= most)
    heads = [each.attention.query_heads for each in workload.layers if each.attention is not None]
    heads += [each.recurrence.num_groups for each in workload.layers if each.recurrence is not None]
    if not heads or workload.seq_length < LONG_SEQUENCE or not workload.can_cut_tokens:
        return (1,)
    most = gcd(*heads)
    return tuple(size for size in divisors(problem.cluster.num_devices) if most % size == 0)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in rising order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


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
    def kept_keys(self) -> KeptKeys:
        """Form of keys, values and their gradients between token slices."""
        return KeptKeys(self.shared["key_value_gradients"], self.shared["latent_kept"] == "latent")

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

    def along(self, axes: Axis | Sequence[Axis], values: "Sequence[Any] | NDArray[Any]") -> "NDArray[Any]":
        """Return values as an array that broadcasts over the grid.

        Args:
            values: one for each value of the axis; for several, one for each of their pairs, nested: [axis, axis].
        """
        import numpy as np

        names = (axes,) if isinstance(axes, str) else axes
        shape = [len(getattr(self, axis)) if axis in names else 1 for axis in AXES]
        return np.asarray(values).reshape(shape)

    @cached_property
    def model_chunks(self) -> "NDArray[np.int64]":
        """Model chunks of a pipeline rank: [order, 1, 1, 1, 1, 1, 1]."""
        return self.along("order", [model_chunks for _, model_chunks in self.order])

    @cached_property
    def num_micro_batches(self) -> "NDArray[np.int64]":
        """Micro-batches of a data-parallel rank: [1, 1, micro_batch, 1, 1, 1, 1], for sizes that divide the batch."""
        sizes = (size * self.layout.data_parallel_size for size in self.micro_batch)
        return self.along("micro_batch", [max(self.global_batch_size // size, 1) for size in sizes])

    def keep(self, axis: Axis, kept: "NDArray[np.bool_]") -> "StrategyGrid":
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
