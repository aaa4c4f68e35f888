"""The space of a search: the question, and the values that are tried for each dimension.

    SearchProblem -> Choices (values of each dimension) -> `strategy_grid.StrategyGrid` (the strategies of one layout)

Loads neither numpy nor pydantic: the flags of all commands need it for their help.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import gcd, prod
from typing import Any

from deepspeed_ext.plan.layout import StagePartition
from megatron_terapipe.dimensions import Dimension, Tried
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.strategy import DIMENSIONS

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


LEAST_TOKENS_OF_A_RANK = 4096  # tokens of a sequence that ranks of a ring share at least


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
        case Tried.SHARDS_OF_A_NODE:
            nodes = problem.cluster.nodes
            return (None, *(divisors(nodes[0].num_devices)[1:] if len(nodes) > 1 else ()))
        case values:
            is_long = workload.seq_length >= LONG_SEQUENCE
            return values if values is None or not is_long else (*values, *dimension.tried_if_long)


def _shares_of_heads(problem: SearchProblem) -> tuple[int, ...]:
    """Sizes with which ranks can share the heads of every attention and recurrence, and all devices are used."""
    workload = problem.workload
    if problem.software.communication.ring:
        longest = workload.seq_length // LEAST_TOKENS_OF_A_RANK
        return tuple(size for size in divisors(problem.cluster.num_devices) if size <= max(longest, 1))
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
