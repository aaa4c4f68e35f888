"""The axes of ranks (pipe, data, sequence, tensor), and the layers of each stage."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.text_files import parse_json, read_text

__all__ = ["Coordinate", "ParallelLayout", "StagePartition"]


class Coordinate(NamedTuple):
    """Place of one rank on each axis that has ranks."""

    pipe: int
    data: int
    sequence: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel axes, and the map between ranks and coordinates.

    Ranks run over `pipe` slowest and `tensor` fastest, as DeepSpeed's checkpoints expect. Token slices multiply
    the steps of the pipeline, never the number of ranks (ADR 0001): `world_size = dp * sp * tp * pp`. Sequence-parallel
    ranks share the tokens of every token slice.

    Example:
        >>> layout = ParallelLayout(data_parallel_size=2, pipeline_parallel_size=4, num_token_slices=8)
        >>> layout.world_size, layout.coordinate(5), layout.rank(Coordinate(pipe=2, data=1, sequence=0, tensor=0))
        (8, Coordinate(pipe=2, data=1, sequence=0, tensor=0), 5)
    """

    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_token_slices: int = 1
    expert_parallel_size: int = 1
    """Neighbouring data-, sequence- and tensor-parallel ranks of a stage that share the experts of its layers."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise PlanError(f"{name}={size!r} is not a positive whole number: give 1 or more")
        if self.ranks_of_a_stage % self.expert_parallel_size:
            factors = self.data_parallel_size, self.sequence_parallel_size, self.tensor_parallel_size
            raise PlanError(
                f"expert parallel size {self.expert_parallel_size} does not divide the data x sequence x tensor "
                f"parallel size {' x '.join(map(str, factors))} = {self.ranks_of_a_stage} of a stage: give a divisor "
                "of it, or launch more processes"
            )

    @classmethod
    def for_world_size(cls, world_size: int, **others: int) -> "ParallelLayout":
        """Give the data-parallel axis all ranks that the other axes do not use; `others` are the other fields."""
        sizes = {axis: others.get(f"{axis}_parallel_size", 1) for axis in ("sequence", "tensor", "pipeline")}
        if sizes["sequence"] == 1:
            del sizes["sequence"]
        ranks_of_replica = prod(sizes.values())
        if min(sizes.values()) < 1 or world_size < 1 or world_size % ranks_of_replica:
            raise PlanError(
                f"world size {world_size} is not a multiple of {' x '.join(sizes)} parallel size "
                f"{' x '.join(map(str, sizes.values()))} = {ranks_of_replica}: "
                f"launch a multiple of {ranks_of_replica} processes, as deepspeed --num_accelerators "
                f"{ranks_of_replica} does on one host, or change these sizes"
            )
        return cls(data_parallel_size=world_size // ranks_of_replica, **others)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks_of_a_stage * self.pipeline_parallel_size

    @property
    def ranks_of_a_stage(self) -> int:
        """Ranks with a part or a copy of the same layers."""
        return self.num_weight_copies * self.tensor_parallel_size

    @property
    def num_expert_copies(self) -> int:
        """Ranks with the same experts."""
        return self.ranks_of_a_stage // self.expert_parallel_size

    @property
    def num_weight_copies(self) -> int:
        """Ranks with the same weights: over them gradients are averaged, and ZeRO 1 partitions the optimizer."""
        return self.data_parallel_size * self.sequence_parallel_size

    def rank(self, coordinate: Coordinate) -> int:
        """Rank at a coordinate."""
        replica = coordinate.pipe * self.data_parallel_size + coordinate.data
        part = replica * self.sequence_parallel_size + coordinate.sequence
        return part * self.tensor_parallel_size + coordinate.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is outside 0..{self.world_size - 1}")
        part, tensor = divmod(rank, self.tensor_parallel_size)
        replica, sequence = divmod(part, self.sequence_parallel_size)
        pipe, data = divmod(replica, self.data_parallel_size)
        return Coordinate(pipe, data, sequence, tensor)

    def coordinates(self) -> Iterator[Coordinate]:
        """Every coordinate, by rank."""
        return (self.coordinate(rank) for rank in range(self.world_size))

    def groups(self, axis: str) -> list[list[int]]:
        """Rank lists that differ only in `axis`: the communication groups of that axis.

        `expert` are the ranks that share experts, `expert_copies` the ranks of a stage with the same experts.
        """
        size, stage = self.expert_parallel_size, self.ranks_of_a_stage
        if axis == "expert":
            return [[*range(first, first + size)] for first in range(0, self.world_size, size)]
        if axis == "expert_copies":
            firsts = range(0, self.world_size, stage)
            return [[*range(first + place, first + stage, size)] for first in firsts for place in range(size)]
        groups: dict[Coordinate, list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates()):
            groups.setdefault(coordinate._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())


METHODS = ("uniform", "parameters")
"""Stage partitions that are computed; any other is a list of bounds or a file of one."""

_LIST = re.compile(r"\s*-?[0-9]{1,18}\s*(,\s*-?[0-9]{1,18}\s*)*")

MOST_BALANCED = 50_000_000
"""Layers x layers x stages for which a partition is balanced: some ten seconds."""


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Bounds of the stages: stage i holds layers `bounds[i]` up to `bounds[i + 1]`.

    The first and the last stage may have none of these layers, if other layers belong to them.

    Example:
        >>> StagePartition((0, 5, 12)).layers(1)
        range(5, 12)
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [end - start for start, end in pairwise(self.bounds)]
        ends, between = sizes[:1] + sizes[-1:], sizes[1:-1]
        if self.bounds[:1] != (0,) or not any(sizes) or min(ends) < 0 or min(between, default=1) < 1:
            raise PlanError(
                f"stage partition {self} does not rise from 0, where only the first and the last stage may have no "
                "layer: give the first layer of each stage, then the number of layers, as 0,5,12"
            )

    def __str__(self) -> str:
        return ",".join(map(str, self.bounds))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def is_uniform(self) -> bool:
        """Whether it equals `uniform`."""
        return self.num_stages <= self.num_layers and self == self.uniform(self.num_layers, self.num_stages)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        """Layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def covering(self, num_layers: int, num_stages: int) -> "StagePartition":
        """Return this partition, once it is known to fit a model and a pipeline."""
        if (self.num_layers, self.num_stages) != (num_layers, num_stages):
            raise PlanError(
                f"stage partition {self} has {self.num_stages} stages and {self.num_layers} layers, but the pipeline "
                f"has {num_stages} stages and the model {num_layers} layers: give {num_stages + 1} bounds, "
                f"the last one {num_layers}"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> "StagePartition":
        """Read `0,5,12`, or the name of a JSON file that holds `[0, 5, 12]`."""
        fields: object
        if _LIST.fullmatch(text):
            fields = [int(part) for part in text.split(",")]
        else:
            try:
                fields = parse_json(read_text(text), "it")
            except UserError as error:
                raise PlanError(
                    f"stage partition {text!r} is neither {' nor '.join(METHODS)}, nor a list, nor a file of one "
                    f"({error}): give one of these, a list as 0,5,12"
                ) from None
        if not isinstance(fields, list) or not all(type(bound) is int for bound in fields):
            raise PlanError(f"stage partition file {text!r} does not hold a list of whole numbers: write [0, 5, 12]")
        return cls(tuple(fields))

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> "StagePartition":
        """Return as many layers on each stage, one more on the first ones where they do not divide."""
        _check_room(num_layers, num_stages)
        length, longer = divmod(num_layers, num_stages)
        return cls(tuple(accumulate((length + (stage < longer) for stage in range(num_stages)), initial=0)))

    @classmethod
    def balanced(cls, weights: Sequence[float], num_stages: int) -> "StagePartition":
        """Contiguous layers on each stage so that the heaviest stage is as light as can be; exact."""
        _check_room(len(weights), num_stages)
        if len(weights) ** 2 * num_stages > MOST_BALANCED:
            raise PlanError(
                f"{len(weights)} layers on {num_stages} stages are too many to balance: deal them evenly, or list them"
            )
        before = list(accumulate(weights, initial=0.0))
        # best[n] = (weight of the heaviest stage, bounds) for the first n layers on the stages so far.
        best: list[tuple[float, tuple[int, ...]]] = [(weight, (0, end)) for end, weight in enumerate(before)]
        for stage in range(1, num_stages):
            best = [
                min(
                    (max(best[start][0], before[end] - before[start]), (*best[start][1], end))
                    for start in range(min(stage, end), max(end, 1))
                )
                if end > stage
                else (float("inf"), ())
                for end in range(len(before))
            ]
        return cls(best[-1][1])


def _check_room(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise PlanError(f"{num_layers} layers on {num_stages} stages: give between 1 and {num_layers} stages")
