"""Which layers stand on which stage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.text.json_text import parse_json
from deepspeed_ext.plan.text.text_files import read_text

__all__ = ["StagePartition"]

METHODS = ("uniform", "parameters")
"""Stage partitions that are computed; any other is a list of bounds or a file of one."""

_LIST = re.compile(r"\s*-?[0-9]{1,18}\s*(,\s*-?[0-9]{1,18}\s*)*")

MOST_BALANCED = 50_000_000
"""Layers x layers x stages for which a partition is balanced: some ten seconds."""


@dataclass(frozen=True, slots=True)
class StagePartition:
    """Bounds of the stages: stage i holds layers `bounds[i]` up to `bounds[i + 1]`.

    Example:
        >>> StagePartition((0, 5, 12)).layers(1)
        range(5, 12)

    Raises:
        PlanError: if the bounds do not rise from 0.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the bounds."""
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(end <= start for start, end in pairwise(self.bounds)):
            raise PlanError(
                f"stage partition {self} does not rise from 0: give the first layer of each stage, "
                "then the number of layers, as 0,5,12"
            )

    def __str__(self) -> str:
        """The bounds as `--stage-partition` takes them."""
        return ",".join(map(str, self.bounds))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        """Layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def covering(self, num_layers: int, num_stages: int) -> "StagePartition":
        """Return this partition, once it is known to fit a model and a pipeline.

        Raises:
            PlanError: if it has another number of layers or stages.
        """
        if (self.num_layers, self.num_stages) != (num_layers, num_stages):
            raise PlanError(
                f"stage partition {self} has {self.num_stages} stages and {self.num_layers} layers, but the pipeline "
                f"has {num_stages} stages and the model {num_layers} layers: give {num_stages + 1} bounds, "
                f"the last one {num_layers}"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> "StagePartition":
        """Read `0,5,12`, or the name of a JSON file that holds `[0, 5, 12]`.

        Raises:
            PlanError: if it is neither.
        """
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
        """Return as many layers on each stage, one more on the first ones where they do not divide.

        Raises:
            PlanError: if there are fewer layers than stages.
        """
        _check_room(num_layers, num_stages)
        length, longer = divmod(num_layers, num_stages)
        return cls(tuple(accumulate((length + (stage < longer) for stage in range(num_stages)), initial=0)))

    @classmethod
    def balanced(cls, weights: Sequence[float], num_stages: int) -> "StagePartition":
        """Contiguous layers on each stage so that the heaviest stage is as light as can be; exact.

        Args:
            weights: weight of each layer, >= 0.
            num_stages: stages wanted, each of at least one layer.

        Raises:
            PlanError: if there are fewer layers than stages, or too many of both.
        """
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
