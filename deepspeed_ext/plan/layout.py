"""How ranks are laid out: the axes pipe, data, sequence and tensor, and the token axis, which is time and not ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from deepspeed_ext.plan.errors import PlanError

__all__ = ["Coordinate", "ParallelLayout"]


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
    ranks share the tokens of every token slice (ADR 0048).

    Example:
        >>> layout = ParallelLayout(data_parallel_size=2, pipeline_parallel_size=4, num_token_slices=8)
        >>> layout.world_size, layout.coordinate(5), layout.rank(Coordinate(pipe=2, data=1, sequence=0, tensor=0))
        (8, Coordinate(pipe=2, data=1, sequence=0, tensor=0), 5)

    Raises:
        PlanError: if a size is not a positive whole number.
    """

    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_token_slices: int = 1

    def __post_init__(self) -> None:
        """Check every size."""
        for name in self.__slots__:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise PlanError(f"{name}={size!r} is not a positive whole number: give 1 or more")

    @classmethod
    def for_world_size(
        cls,
        world_size: int,
        *,
        sequence_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        num_token_slices: int = 1,
    ) -> "ParallelLayout":
        """Give the data-parallel axis all the ranks that the other axes leave over.

        Args:
            sequence_parallel_size: ranks that share the tokens of each token slice.
            tensor_parallel_size: ranks that share each layer.
            pipeline_parallel_size: ranks that share the layers.

        Raises:
            PlanError: if the product of the other sizes does not divide `world_size`.
        """
        sizes = {"tensor": tensor_parallel_size, "pipeline": pipeline_parallel_size}
        if sequence_parallel_size != 1:
            sizes = {"sequence": sequence_parallel_size, **sizes}
        ranks_of_replica = prod(sizes.values())
        if min(sizes.values()) < 1 or world_size < 1 or world_size % ranks_of_replica:
            raise PlanError(
                f"world size {world_size} is not a multiple of {' x '.join(sizes)} parallel size "
                f"{' x '.join(map(str, sizes.values()))} = {ranks_of_replica}: "
                f"launch a multiple of {ranks_of_replica} processes, as deepspeed --num_accelerators "
                f"{ranks_of_replica} does on one host, or change these sizes"
            )
        return cls(
            data_parallel_size=world_size // ranks_of_replica,
            sequence_parallel_size=sequence_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            num_token_slices=num_token_slices,
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_weight_copies * self.tensor_parallel_size * self.pipeline_parallel_size

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
        """Coordinate of a rank.

        Raises:
            PlanError: if the rank is outside `range(world_size)`.
        """
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
        """Rank lists that differ in `axis` alone: the communication groups of that axis."""
        groups: dict[Coordinate, list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates()):
            groups.setdefault(coordinate._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())
